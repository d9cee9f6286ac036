import { ApiError } from '$lib/api/errors';
import type { Rating, RatingChange, StepDetail, StepSummary } from '$lib/api/types';
import { backend, live } from '$lib/state/live.svelte';
import { notices } from '$lib/state/notices.svelte';

const PAGE = 50;

interface Past {
  uid: string;
  change: RatingChange;
}

/** A step without the tokens and messages that a list has no use for. */
function light(step: StepDetail): StepSummary {
  const {
    messages: _m,
    response: _r,
    logprobs: _l,
    response_ids: _i,
    rewards: _w,
    ...summary
  } = step;
  return summary;
}

/** The answers that wait for a vote. A voted answer keeps its place until the screen is left. */
export class ReviewQueue {
  items = $state.raw<StepSummary[]>([]);
  loaded = $state(false);
  error = $state.raw<ApiError | null>(null);
  saving = $state<string | null>(null);
  last = $state<string | null>(null);
  #cursor: string | null = null;
  #fetching = false;
  #past: Past[] = [];

  readonly left = $derived(this.items.filter((step) => !step.rating).length);

  find(uid: string | null): StepSummary | undefined {
    return this.items.find((step) => step.uid === uid);
  }

  /** Fetches the first page and puts answers that are new in front of those already here. */
  refresh = async (): Promise<void> => {
    try {
      const page = await backend.steps({ unrated: true, limit: PAGE });
      const known = new Set(this.items.map((step) => step.uid));
      const fresh = page.items.filter((step) => !known.has(step.uid));
      if (this.items.length === 0) this.#cursor = page.next_cursor ?? null;
      this.items = [...fresh, ...this.items];
      this.error = null;
    } catch (cause) {
      this.error = cause instanceof ApiError ? cause : new ApiError('internal', String(cause), 0);
    } finally {
      this.loaded = true;
    }
  };

  more = async (): Promise<void> => {
    if (!this.#cursor || this.#fetching) return;
    this.#fetching = true;
    try {
      const page = await backend.steps({ unrated: true, limit: PAGE, cursor: this.#cursor });
      const known = new Set(this.items.map((step) => step.uid));
      this.items = [...this.items, ...page.items.filter((step) => !known.has(step.uid))];
      this.#cursor = page.next_cursor ?? null;
    } catch {
      // The next scroll tries again; what is here stays usable.
    } finally {
      this.#fetching = false;
    }
  };

  /** Takes in an answer that was opened by its address. */
  include(step: StepDetail): void {
    if (!this.find(step.uid)) this.items = [light(step), ...this.items];
  }

  vote = (uid: string, rating: Rating): Promise<boolean> => {
    const step = this.find(uid);
    if (!step) return Promise.resolve(false);
    // The same vote again keeps its reasons; a turned vote drops reasons that no longer fit.
    const same = step.rating === rating;
    return this.change(uid, {
      rating,
      reasons: same ? step.reasons : [],
      note: step.note ?? undefined,
      correction: step.correction ?? undefined,
    });
  };

  /** Applies a change at once and takes it back when the daemon refuses it. */
  async change(uid: string, change: RatingChange, remember = true): Promise<boolean> {
    const before = this.find(uid);
    if (!before) return false;
    this.#put({
      ...before,
      rating: change.rating,
      reasons: change.reasons ?? [],
      note: change.note ?? null,
      correction: change.correction ?? null,
    });
    this.saving = uid;
    try {
      await backend.rate(uid, change);
    } catch (cause) {
      this.#put(before);
      notices.fail(cause);
      return false;
    } finally {
      this.saving = null;
    }
    this.last = change.rating ? uid : null;
    if (remember) {
      this.#past.push({
        uid,
        change: {
          rating: before.rating,
          reasons: before.reasons,
          note: before.note ?? undefined,
          correction: before.correction ?? undefined,
        },
      });
    }
    // The daemon knows what the vote did; it says so on the step.
    void backend.step(uid).then(
      (step) => this.#put(light(step)),
      () => undefined,
    );
    void live.refresh();
    return true;
  }

  /** Takes back the newest change. Returns the answer it belonged to. */
  undo = async (): Promise<string | null> => {
    const past = this.#past.pop();
    if (!past) return null;
    const done = await this.change(past.uid, past.change, false);
    if (!done) this.#past.push(past);
    return done ? past.uid : null;
  };

  remove(uid: string): void {
    this.items = this.items.filter((step) => step.uid !== uid);
    this.#past = this.#past.filter((past) => past.uid !== uid);
    if (this.last === uid) this.last = null;
  }

  /** Restores the full text of an answer, which lists hold shortened. */
  #put(step: StepSummary): void {
    this.items = this.items.map((known) =>
      known.uid === step.uid ? { ...known, ...step } : known,
    );
  }
}
