import type { Rating } from '$lib/api/types';
import { m } from '$paraglide/messages.js';

/** Reason tags are stored by name; none is ever required. */
export const REASONS: Record<Rating, [tag: string, label: () => string][]> = {
  up: [
    ['correct', m.reason_correct],
    ['followed_instructions', m.reason_followed],
    ['right_length', m.reason_right_length],
    ['good_style', m.reason_good_style],
    ['thorough', m.reason_thorough],
  ],
  down: [
    ['incorrect', m.reason_incorrect],
    ['ignored_instructions', m.reason_ignored],
    ['too_long', m.reason_too_long],
    ['too_short', m.reason_too_short],
    ['bad_style', m.reason_bad_style],
    ['refused', m.reason_refused],
  ],
};
