import { m } from '$paraglide/messages.js';

/** Runs are numbered; `run 12` says it in words. */
export const runName = (id: string | number) => m.run_name({ number: String(id) });
