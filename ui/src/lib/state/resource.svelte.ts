import { ApiError } from '$lib/api/errors';

/**
 * One answer of the daemon: its value, whether it is being fetched, and why it could not be. A
 * refresh keeps the old value on screen until the new one is there.
 */
export class Resource<T> {
  value = $state.raw<T>();
  error = $state.raw<ApiError | null>(null);
  busy = $state(false);
  #fetch: () => Promise<T>;
  #latest = 0;

  constructor(fetch: () => Promise<T>) {
    this.#fetch = fetch;
  }

  load = async (): Promise<void> => {
    this.#latest += 1;
    const mine = this.#latest;
    this.busy = true;
    try {
      const value = await this.#fetch();
      if (mine !== this.#latest) return;
      this.value = value;
      this.error = null;
    } catch (cause) {
      if (mine !== this.#latest) return;
      this.error = cause instanceof ApiError ? cause : new ApiError('internal', String(cause), 0);
    } finally {
      if (mine === this.#latest) this.busy = false;
    }
  };

  /** Drops the value, for when the question itself has changed. */
  reset(): void {
    this.#latest += 1;
    this.value = undefined;
    this.error = null;
    this.busy = false;
  }
}
