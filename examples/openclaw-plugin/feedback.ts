/**
 * Joins what people say about an answer to the answer itself.
 *
 * `llm_output` names the completion id and the trace id of each answer, `message_sent` the
 * message it became in the channel. A reply or reaction names that message, so the rating that
 * is sent to Spotter belongs to exactly one answer. Nothing but ids and the person's own words
 * about the answer leaves this plugin.
 */

type Rating = 'up' | 'down';

export interface Answer {
  /** The completion id, `chatcmpl-…`. */
  id?: string;
  /** The trace id of the turn. */
  traceId?: string;
}

export interface Feedback {
  rating: Rating;
  note?: string;
  correction?: string;
  /** The channel message it is about, when the text itself names it. */
  about?: string;
}

/** How many channel messages are remembered. */
const REMEMBERED = 2000;
const REQUEST_TIMEOUT_MS = 10_000;

const THUMB = /^(👍|👎)(?:[\u{1F3FB}-\u{1F3FF}]|\uFE0F)*\s*(.*)$/su;
const REACTION = /reaction added: (👍|👎)\S* by .* on msg (\S+)/u;
const CORRECTION =
  /^(?:because\s+)?(?:(?:the|your)\s+(?:answer|reply|response)\s+)?(?:it\s+)?should(?:\s+have)?\s+(?:be|been|say|said|read)\s*:?\s+(.+)$/isu;

function rated(rating: Rating, words: string): Feedback {
  const text = words.trim().replace(/^[:,-]\s*/u, '');
  const correction = rating === 'down' ? CORRECTION.exec(text)?.[1]?.trim() : undefined;
  if (correction) return { rating, correction };
  const note = text.replace(/^because\s+/iu, '');
  return note ? { rating, note } : { rating };
}

/** Reads a message that is feedback; null when it is anything else. */
export function parseFeedback(text: string): Feedback | null {
  const trimmed = text.trim();
  const reaction = REACTION.exec(trimmed);
  if (reaction) {
    return { rating: reaction[1] === '👍' ? 'up' : 'down', about: reaction[2] };
  }
  const thumb = THUMB.exec(trimmed);
  if (!thumb) return null;
  const rating: Rating = thumb[1] === '👍' ? 'up' : 'down';
  const words = (thumb[2] ?? '').trim();
  const isFeedback = words === '' || /^(because|should|(the|your) answer should)\b/iu.test(words);
  return isFeedback ? rated(rating, words) : null;
}

/** The answers of each conversation, and the channel messages they became. */
export class Answers {
  #last = new Map<string, Answer>();
  #messages = new Map<string, Answer>();

  answered(session: string, answer: Answer): void {
    this.#last.set(session, answer);
  }

  sent(session: string, message: string): void {
    const answer = this.#last.get(session);
    if (!answer) return;
    this.#messages.set(message, answer);
    const oldest = this.#messages.keys().next().value;
    if (this.#messages.size > REMEMBERED && oldest !== undefined) this.#messages.delete(oldest);
  }

  /** The answer a message became, or without a message the last one of the conversation. */
  find(session: string, message?: string): Answer | undefined {
    return message === undefined ? this.#last.get(session) : this.#messages.get(message);
  }
}

interface Target {
  url: string;
  token: string;
}

/** Where Spotter is: the plugin's own settings, then the provider entry of OpenClaw. */
export function target(config: any, own: any): Target | null {
  const provider = config?.models?.providers?.[own?.provider ?? 'spotter'];
  const address: unknown = own?.url ?? provider?.baseUrl;
  if (typeof address !== 'string') return null;
  const token = own?.token ?? provider?.apiKey;
  return {
    url: address.replace(/\/+$/u, '').replace(/\/v1$/u, ''),
    token: typeof token === 'string' ? token : '',
  };
}

export async function send(to: Target, answer: Answer, feedback: Feedback): Promise<void> {
  const { rating, note, correction } = feedback;
  const response = await fetch(`${to.url}/v1/feedback`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', authorization: `Bearer ${to.token}` },
    body: JSON.stringify({ id: answer.id, trace_id: answer.traceId, rating, note, correction }),
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  });
  if (!response.ok) throw new Error(`Spotter answered ${response.status}`);
}

/** Called by OpenClaw once, with its plugin API. */
export function register(api: any): void {
  const answers = new Answers();
  const sessionOf = (event: any, context: any): string =>
    context?.sessionKey ?? event?.sessionKey ?? context?.sessionId ?? event?.sessionId ?? '';

  const rate = async (session: string, message: string | undefined, feedback: Feedback) => {
    const to = target(api.config, api.pluginConfig);
    const answer = answers.find(session, feedback.about ?? message);
    if (!to || !answer) return false;
    await send(to, answer, feedback);
    return true;
  };

  api.on('llm_output', (event: any, context: any) => {
    const answer: Answer = {
      id: event?.lastAssistant?.responseId,
      traceId: context?.trace?.traceId,
    };
    // Without either, the answer came from somewhere else.
    if (answer.id || answer.traceId) answers.answered(sessionOf(event, context), answer);
  });

  api.on('message_sent', (event: any, context: any) => {
    if (event?.success && event.messageId) {
      answers.sent(sessionOf(event, context), String(event.messageId));
    }
  });

  api.on('message_received', async (event: any, context: any) => {
    const feedback = parseFeedback(String(event?.content ?? ''));
    if (!feedback) return;
    const message = event.replyToIdFull ?? event.replyToId;
    try {
      await rate(sessionOf(event, context), message && String(message), feedback);
    } catch (error) {
      api.logger?.warn?.(`spotter-feedback: the rating was not sent: ${error}`);
    }
  });

  for (const [name, rating] of [
    ['good', 'up'],
    ['bad', 'down'],
  ] as const) {
    api.registerCommand?.({
      name,
      description:
        rating === 'up' ? 'Like the last answer' : 'Dislike the last answer: why, or what it should be',
      acceptsArgs: true,
      handler: async (context: any) => {
        try {
          const found = await rate(
            sessionOf(undefined, context),
            undefined,
            rated(rating, String(context?.args ?? '')),
          );
          return { text: found ? 'Thanks, noted.' : 'There is no answer of Spotter to rate here yet.' };
        } catch (error) {
          return { text: `The rating was not sent: ${error}` };
        }
      },
    });
  }
}
