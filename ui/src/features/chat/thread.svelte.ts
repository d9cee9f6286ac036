import { ApiError } from '$lib/api/errors';
import type { ChatMessage, Rating } from '$lib/api/types';
import { backend } from '$lib/state/live.svelte';
import { attempt } from '$lib/state/notices.svelte';

export class Turn {
  answer = $state('');
  reasoning = $state('');
  step = $state<string | null>(null);
  adapter = $state<string | null>(null);
  rating = $state<Rating | null>(null);
  error = $state.raw<ApiError | null>(null);
  done = $state(false);

  constructor(readonly question: string) {}
}

/** One conversation with one model name. */
export class Thread {
  model = $state('');
  turns = $state.raw<Turn[]>([]);
  busy = $state(false);
  #stop: AbortController | null = null;

  constructor(model: string) {
    this.model = model;
  }

  async ask(question: string): Promise<void> {
    const turn = new Turn(question);
    const messages: ChatMessage[] = this.turns
      .filter((past) => past.answer)
      .flatMap((past): ChatMessage[] => [
        { role: 'user', content: past.question },
        { role: 'assistant', content: past.answer },
      ]);
    messages.push({ role: 'user', content: question });
    this.turns = [...this.turns, turn];
    this.busy = true;
    const stop = new AbortController();
    this.#stop = stop;
    try {
      await backend.chat({
        model: this.model,
        messages,
        signal: stop.signal,
        onAnswer: ({ step, adapter }) => {
          turn.step = step;
          turn.adapter = adapter;
        },
        onChunk: ({ content, reasoning }) => {
          turn.answer += content ?? '';
          turn.reasoning += reasoning ?? '';
        },
      });
    } catch (cause) {
      if (!stop.signal.aborted) {
        turn.error = cause instanceof ApiError ? cause : ApiError.unreachable(cause);
      }
    } finally {
      turn.done = true;
      this.busy = false;
    }
  }

  stop(): void {
    this.#stop?.abort();
  }

  async rate(turn: Turn, rating: Rating): Promise<void> {
    const { step } = turn;
    if (!step) return;
    const before = turn.rating;
    turn.rating = before === rating ? null : rating;
    if (!(await attempt(() => backend.rate(step, { rating: turn.rating })))) turn.rating = before;
  }
}
