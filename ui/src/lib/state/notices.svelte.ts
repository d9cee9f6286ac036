import { ApiError } from '$lib/api/errors';
import { describeError } from '$lib/text/errors';

export interface Notice {
  id: number;
  tone: 'plain' | 'error';
  text: string;
  detail?: string;
  action?: { label: string; run: () => void };
}

/** Short messages at the foot of the window. Errors stay until they are closed. */
class Notices {
  items = $state<Notice[]>([]);
  #next = 0;

  say(text: string, more: { detail?: string; action?: Notice['action'] } = {}): void {
    this.#add({ tone: 'plain', text, ...more }, 6000);
  }

  /** Something the daemon wants a person to know. */
  alert(level: string, code: string, message: string): void {
    if (level === 'error') this.fail(new ApiError(code, message, 0));
    else this.say(message);
  }

  fail(cause: unknown): void {
    const error = cause instanceof ApiError ? cause : new ApiError('internal', String(cause), 0);
    this.#add({ tone: 'error', ...describeError(error) }, null);
  }

  dismiss(id: number): void {
    this.items = this.items.filter((notice) => notice.id !== id);
  }

  #add(notice: Omit<Notice, 'id'>, forMs: number | null): void {
    const id = (this.#next += 1);
    this.items = [...this.items.filter((n) => n.text !== notice.text).slice(-2), { id, ...notice }];
    if (forMs !== null) setTimeout(() => this.dismiss(id), forMs);
  }
}

export const notices = new Notices();

/** Runs something the user asked for and says so when it fails. Returns whether it was done. */
export async function attempt(work: () => Promise<unknown>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (cause) {
    notices.fail(cause);
    return false;
  }
}
