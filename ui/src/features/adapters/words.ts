import type { Adapter } from '$lib/api/types';
import { m } from '$paraglide/messages.js';

/** `base` is a model, not a version; it gets a name people read. */
export const adapterName = (version: string) => (version === 'base' ? m.base_model() : version);

/** The same inside a sentence. */
export const adapterInline = (version: string) =>
  version === 'base' ? m.base_model_inline() : version;

const STATES: Record<Adapter['state'], () => string> = {
  live: m.state_live,
  kept: m.state_kept,
  rejected: m.state_rejected,
  candidate: m.state_candidate,
  imported: m.state_imported,
};

export const stateWord = (state: Adapter['state']) => STATES[state]?.() ?? state;
