import type { StepSummary } from '$lib/api/types';
import { runName } from '$lib/text/names';
import { m } from '$paraglide/messages.js';

const DROPPED: Record<string, () => string> = {
  stale: m.dropped_stale,
  no_logprobs: m.dropped_no_logprobs,
  ratio: m.dropped_ratio,
  too_long: m.dropped_too_long,
  side: m.dropped_side,
};

export const droppedReason = (reason: string) => DROPPED[reason]?.() ?? reason;

/** What this vote did, or will do. Votes that lead nowhere visible are not worth casting. */
export function consequence(step: StepSummary): string | null {
  if (!step.rating && !step.correction) return null;
  if (step.used_in_run) return m.vote_used({ run: runName(step.used_in_run) });
  if (step.dropped_reason) return m.vote_dropped({ reason: droppedReason(step.dropped_reason) });
  if (step.in_next_lesson) return m.vote_next();
  return m.vote_saved();
}
