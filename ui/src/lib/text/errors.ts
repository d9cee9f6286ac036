import type { ApiError } from '$lib/api/errors';
import { m } from '$paraglide/messages.js';

const BY_CODE: Record<string, () => string> = {
  unreachable: m.error_unreachable,
  unauthorized: m.error_unauthorized,
  invalid_api_key: m.error_unauthorized,
  not_found: m.error_not_found,
  busy: m.error_busy,
  too_few_labels: m.error_too_few_labels,
  unavailable: m.error_unavailable,
  model_not_ready: m.error_unavailable,
  context_length_exceeded: m.error_context_length,
  disk_full: m.error_disk_full,
  invalid_setting: m.error_invalid_setting,
};

/** The sentence for an error code, with the daemon's own words as detail. */
export function describeError(error: ApiError): { text: string; detail?: string } {
  const known = BY_CODE[error.code];
  return {
    text: known ? known() : m.error_other(),
    detail: error.message && error.code !== 'unreachable' ? error.message : undefined,
  };
}
