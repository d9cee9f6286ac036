import type { Forgotten } from '$lib/api/types';
import { m } from '$paraglide/messages.js';
import { attempt, notices } from './notices.svelte';

/** Forgets, and names the adapters that keep what they learned. Returns whether it was done. */
export function forget(work: () => Promise<Forgotten>): Promise<boolean> {
  return attempt(async () => {
    const { adapters } = await work();
    notices.say(
      m.forgotten(),
      adapters.length > 0 ? { detail: m.forgotten_learned({ adapters: adapters.join(', ') }) } : {},
    );
  });
}
