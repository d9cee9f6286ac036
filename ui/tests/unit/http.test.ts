import type { Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { ApiError } from '../../src/lib/api/errors';
import { HttpBackend } from '../../src/lib/api/http';
import type { ServerEvent } from '../../src/lib/api/types';
import { createMock } from '../mock/server.mjs';

let server: Server;
let url: string;
let backend: HttpBackend;

beforeAll(async () => {
  server = createMock({ token: 'secret', runSeconds: 1 });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', () => resolve()));
  url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  backend = new HttpBackend(url, 'secret');
});
afterAll(() => {
  server.closeAllConnections();
  server.close();
});

const refusal = (work: Promise<unknown>) =>
  work.then(
    () => null,
    (cause: unknown) => cause as ApiError,
  );

describe('the API client', () => {
  it('sends the token and reads the status', async () => {
    expect((await backend.status()).adapter.live).toBe('v2');
  });

  it('tells a wrong token from an absent daemon', async () => {
    const denied = await refusal(new HttpBackend(url, 'wrong').status());
    expect(denied).toMatchObject({ code: 'unauthorized', status: 401 });
    const absent = await refusal(new HttpBackend('http://127.0.0.1:9', null).status());
    expect(absent).toMatchObject({ code: 'unreachable', status: 0 });
  });

  it('pages through steps and leaves empty filters out of the address', async () => {
    const first = await backend.steps({ limit: 3, q: '', unrated: false });
    expect(first.items).toHaveLength(3);
    const second = await backend.steps({ limit: 3, cursor: first.next_cursor ?? '' });
    expect(second.items.map((s) => s.uid)).not.toContain(first.items[0]!.uid);
  });

  it('rates, withdraws and reports what the vote did', async () => {
    const { items } = await backend.steps({ unrated: true, limit: 1 });
    const { uid } = items[0]!;
    await backend.rate(uid, { rating: 'down', reasons: ['too_long'], correction: 'Shorter.' });
    expect(await backend.step(uid)).toMatchObject({
      rating: 'down',
      reasons: ['too_long'],
      correction: 'Shorter.',
      in_next_lesson: true,
    });
    await backend.rate(uid, { rating: null });
    expect((await backend.step(uid)).rating).toBeNull();
  });

  it('gives the code and the words of a refusal', async () => {
    expect(await refusal(backend.step('nothing'))).toMatchObject({
      code: 'not_found',
      status: 404,
    });
    expect(await refusal(backend.changeSetting('training.min_labels', 2))).toMatchObject({
      code: 'invalid_request',
      message: 'Fresh ratings per lesson must be at least 8.',
    });
  });

  it('survives an answer that is not JSON', async () => {
    const error = await ApiError.from(new Response('<html>Bad gateway</html>', { status: 502 }));
    expect(error).toMatchObject({ code: 'http_502', status: 502 });
  });

  it('streams an answer with its step and adapter', async () => {
    let text = '';
    let answer: unknown;
    await backend.chat({
      model: 'spotter:base',
      messages: [{ role: 'user', content: 'Hello' }],
      onAnswer: (value) => (answer = value),
      onChunk: ({ content }) => (text += content ?? ''),
    });
    expect(text).toContain('the base model');
    expect(answer).toMatchObject({ adapter: 'base' });
  });

  it('follows events and ends when asked to', async () => {
    const stop = new AbortController();
    const seen: ServerEvent[] = [];
    const following = backend
      .events(
        stop.signal,
        () => undefined,
        (event) => {
          seen.push(event);
          if (event.type === 'rating') stop.abort();
        },
      )
      .catch(() => undefined);
    const { items } = await backend.steps({ limit: 1 });
    await backend.rate(items[0]!.uid, { rating: 'up' });
    await following;
    expect(seen.map((event) => event.type)).toContain('rating');
  });
});
