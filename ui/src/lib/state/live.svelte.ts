import { HttpBackend } from '$lib/api/http';
import type { Backend } from '$lib/api/backend';
import { findConnection } from '$lib/api/connection';
import { ApiError } from '$lib/api/errors';
import type { EventKind, ServerEvent, Status } from '$lib/api/types';

const connection = findConnection();

export const backend: Backend = new HttpBackend(connection.url, connection.token);

type Listener = (event: ServerEvent | null) => void;

/** The daemon as it is now, and the stream of what changes. */
class Live {
  status = $state.raw<Status | null>(null);
  connection = $state<'connecting' | 'open' | 'lost' | 'unauthorized'>('connecting');
  #listeners = new Map<EventKind, Set<Listener>>();
  #wake: (() => void) | null = null;

  /**
   * Calls back on events of these kinds, and with null after a lost connection returned, when
   * anything may have changed. Calls are gathered: at most one per 250 ms.
   */
  on(kinds: EventKind[], listener: Listener): () => void {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let latest: ServerEvent | null = null;
    const gathered: Listener = (event) => {
      latest = event;
      timer ??= setTimeout(() => {
        timer = undefined;
        listener(latest);
      }, 250);
    };
    for (const kind of kinds) {
      const set = this.#listeners.get(kind) ?? new Set();
      set.add(gathered);
      this.#listeners.set(kind, set);
    }
    return () => {
      clearTimeout(timer);
      for (const kind of kinds) this.#listeners.get(kind)?.delete(gathered);
    };
  }

  refresh = async (): Promise<void> => {
    try {
      this.status = await backend.status();
    } catch (cause) {
      if (cause instanceof ApiError && cause.status === 401) this.connection = 'unauthorized';
    }
  };

  retryNow = (): void => this.#wake?.();

  async follow(signal: AbortSignal): Promise<void> {
    let wait = 500;
    let opened = false;
    while (!signal.aborted) {
      try {
        await backend.events(
          signal,
          () => {
            const again = opened;
            opened = true;
            wait = 500;
            this.connection = 'open';
            void this.refresh();
            if (again) this.#everyone(null);
          },
          (event) => this.#take(event),
        );
        this.connection = 'lost';
      } catch (cause) {
        if (signal.aborted) return;
        const denied = cause instanceof ApiError && cause.status === 401;
        this.connection = denied ? 'unauthorized' : 'lost';
        if (denied) return;
      }
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, wait);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
      wait = Math.min(8000, wait * 2);
    }
  }

  #take(event: ServerEvent): void {
    if (event.type === 'status') this.status = event as Status;
    for (const listener of this.#listeners.get(event.type) ?? []) listener(event);
  }

  #everyone(event: null): void {
    for (const listener of new Set([...this.#listeners.values()].flatMap((set) => [...set]))) {
      listener(event);
    }
  }
}

export const live = new Live();

/** Reloads a resource whenever one of these events arrives; to be called while a component starts. */
export function reloadOn(kinds: EventKind[], load: () => unknown): void {
  $effect(() => live.on(kinds, () => void load()));
}
