import type { Run } from '$lib/api/types';
import { m } from '$paraglide/messages.js';

const ACTIVE = new Set([
  'queued',
  'collecting',
  'preparing',
  'starting',
  'training',
  'running',
  'checking',
  'paused',
]);

/** A run that has not ended; anything with an end time has. */
export const isActive = (run: Run) => run.ended_at == null && ACTIVE.has(run.state);

/** The outcome in a word: what became of this run. */
export function outcome(run: Run): { word: string; tone: 'live' | 'rejected' | 'plain' } {
  if (isActive(run)) {
    const words: Record<string, () => string> = {
      paused: m.run_paused,
      checking: m.run_checking,
      queued: m.run_queued,
    };
    return { word: (words[run.state] ?? m.run_training)(), tone: 'plain' };
  }
  if (run.verdict) {
    return run.verdict.promoted
      ? { word: m.run_promoted(), tone: 'live' }
      : { word: m.run_rejected(), tone: 'rejected' };
  }
  if (run.state === 'cancelled') return { word: m.run_cancelled(), tone: 'plain' };
  if (run.state === 'failed' || run.error) return { word: m.run_failed(), tone: 'rejected' };
  return { word: m.run_ended(), tone: 'plain' };
}
