import type { ApiError } from '$lib/api/errors';
import { m } from '$paraglide/messages.js';

const BY_CODE: Record<string, () => string> = {
  unreachable: m.error_unreachable,
  unauthorized: m.error_unauthorized,
  invalid_api_key: m.error_unauthorized,
  not_found: m.error_not_found,
  forbidden: m.error_forbidden,
  model_not_found: m.error_model_not_found,
  conflict: m.error_conflict,
  busy: m.error_busy,
  not_enough_labels: m.error_too_few_labels,
  nothing_to_learn: m.error_nothing_to_learn,
  out_of_memory: m.error_out_of_memory,
  bad_model_file: m.error_bad_model_file,
  checksum_mismatch: m.error_checksum,
  unavailable: m.error_unavailable,
  context_length_exceeded: m.error_context_length,
  disk_full: m.error_disk_full,
  invalid_request: m.error_invalid_request,
};

/** The sentence for an error code, with the daemon's own words as detail. */
export function describeError(error: ApiError): { text: string; detail?: string } {
  const known = BY_CODE[error.code];
  return {
    text: known ? known() : m.error_other(),
    detail: error.message && error.code !== 'unreachable' ? error.message : undefined,
  };
}
