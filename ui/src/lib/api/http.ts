import type { Backend, ChatRequest, StepQuery } from './backend';
import { ApiError } from './errors';
import { readSse } from './sse';
import type {
  Adapter,
  Check,
  ExportFormat,
  Forgotten,
  ImportedData,
  GlossaryEntry,
  Models,
  ConnectGuide,
  Page,
  RatingChange,
  Run,
  Series,
  ServerEvent,
  SessionDetail,
  SessionSummary,
  Setting,
  Status,
  StepDetail,
  StepSummary,
} from './types';

type Query = Record<string, string | number | boolean | undefined>;

const part = encodeURIComponent;

const baseVersion = (live: string): Adapter => ({
  version: 'base',
  state: live === 'base' ? 'live' : 'kept',
  created_at: null,
  steps_used: 0,
  metrics: {},
  pinned: false,
  size_bytes: 0,
});

/** The daemon's control API over HTTP. */
export class HttpBackend implements Backend {
  #token: string | null;
  #lastEvent: string | undefined;

  constructor(
    readonly url: string,
    token: string | null,
  ) {
    this.#token = token;
  }

  status = () => this.#get<Status>('/api/v1/status');

  steps = (query: StepQuery) => this.#get<Page<StepSummary>>('/api/v1/steps', { ...query });
  step = (uid: string) => this.#get<StepDetail>(`/api/v1/steps/${part(uid)}`);
  rate = (uid: string, change: RatingChange) =>
    this.#send('PUT', `/api/v1/steps/${part(uid)}/rating`, change);
  setKind = (uid: string, kind: 'main' | 'side') =>
    this.#send('PUT', `/api/v1/steps/${part(uid)}/kind`, { kind });
  forgetStep = (uid: string) => this.#json<Forgotten>('DELETE', `/api/v1/steps/${part(uid)}`);

  sessions = (query: { q?: string; cursor?: string }) =>
    this.#get<Page<SessionSummary>>('/api/v1/sessions', query);
  session = (uid: string) => this.#get<SessionDetail>(`/api/v1/sessions/${part(uid)}`);
  forgetSession = (uid: string) => this.#json<Forgotten>('DELETE', `/api/v1/sessions/${part(uid)}`);
  outcome = (trajectory: string, reward: number) =>
    this.#send('POST', `/api/v1/trajectories/${part(trajectory)}/outcome`, { reward });

  runs = async () => (await this.#get<{ items: Run[] }>('/api/v1/training/runs')).items;
  run = (id: number) => this.#get<Run>(`/api/v1/training/runs/${id}`);
  runMetrics = async (id: number, points: number) => {
    const path = `/api/v1/training/runs/${id}/metrics`;
    return (await this.#get<{ series: Series[] }>(path, { points })).series;
  };
  startRun = () => this.#json<{ id: number }>('POST', '/api/v1/training/runs', {});
  pauseTraining = () => this.#send('POST', '/api/v1/training/pause');
  resumeTraining = () => this.#send('POST', '/api/v1/training/resume');
  cancelRun = (id: number) => this.#send('POST', `/api/v1/training/runs/${id}/cancel`);
  glossary = async () =>
    (await this.#get<{ items: GlossaryEntry[] }>('/api/v1/training/glossary')).items;

  adapters = async () => {
    const { live, items } = await this.#get<{ live: string; items: Adapter[] }>('/api/v1/adapters');
    // The base model is no adapter to the daemon; to a person it is the first version.
    const known = items.some(({ version }) => version === 'base');
    return { live, items: known ? items : [...items, baseVersion(live)] };
  };
  activate = (version: string) =>
    this.#send('POST', `/api/v1/adapters/${part(version)}/activate`, {});
  rollback = () => this.#send('POST', '/api/v1/adapters/rollback', {});
  exportAdapter = (version: string, request: { format: ExportFormat; out?: string }) =>
    this.#json<{ path: string; bytes: number }>(
      'POST',
      `/api/v1/adapters/${part(version)}/export`,
      request,
    );
  importAdapter = (path: string) => this.#send('POST', '/api/v1/adapters/import', { path });
  pin = (version: string, pinned: boolean) =>
    this.#send('PUT', `/api/v1/adapters/${part(version)}/pin`, { pinned });
  pruneAdapters = () => this.#send('POST', '/api/v1/adapters/prune', {});

  models = () => this.#get<Models>('/api/v1/models');
  pullModel = (name: string) => this.#send('POST', `/api/v1/models/${part(name)}/pull`, {});
  pauseModel = (name: string) => this.#send('POST', `/api/v1/models/${part(name)}/pause`, {});
  activateModel = (name: string) => this.#send('POST', `/api/v1/models/${part(name)}/activate`, {});
  importModel = (path: string) => this.#send('POST', '/api/v1/models/import', { path });
  removeModel = (name: string) => this.#send('DELETE', `/api/v1/models/${part(name)}`);

  settings = async () => (await this.#get<{ items: Setting[] }>('/api/v1/settings')).items;
  changeSetting = (key: string, value: unknown) =>
    this.#send('PATCH', '/api/v1/settings', { [key]: value });
  doctor = async () => (await this.#get<{ checks: Check[] }>('/api/v1/doctor')).checks;
  token = async () => (await this.#get<{ token: string }>('/api/v1/token')).token;
  setRecording = (paused: boolean) => this.#send('POST', '/api/v1/recording', { paused });
  connectGuide = (client: string) => this.#get<ConnectGuide>(`/api/v1/connect/${part(client)}`);

  exportData = async () => (await this.#fetch('GET', '/api/v1/data/export')).blob();
  importData = (lines: string) =>
    this.#json<ImportedData>('POST', '/api/v1/data/import', new Blob([lines]));
  forgetEverything = () => this.#json<Forgotten>('DELETE', '/api/v1/data');

  async chat(request: ChatRequest): Promise<void> {
    const { model, messages, temperature } = request;
    const response = await this.#fetch('POST', '/v1/chat/completions', {
      body: { model, messages, temperature, stream: true },
      signal: request.signal,
    });
    request.onAnswer?.({
      step: response.headers.get('x-spotter-step'),
      adapter: response.headers.get('x-spotter-adapter'),
    });
    if (!response.body) return;
    for await (const { data } of readSse(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data) as {
        error?: { code?: string; message: string };
        choices?: {
          delta?: { content?: string | null; reasoning_content?: string | null };
          finish_reason?: string | null;
        }[];
      };
      if (chunk.error) {
        throw new ApiError(chunk.error.code ?? 'engine', chunk.error.message, response.status);
      }
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      request.onChunk({
        content: choice.delta?.content ?? undefined,
        reasoning: choice.delta?.reasoning_content ?? undefined,
        finish: choice.finish_reason ?? undefined,
      });
    }
  }

  async events(
    signal: AbortSignal,
    onOpen: () => void,
    onEvent: (event: ServerEvent) => void,
  ): Promise<void> {
    const headers: Record<string, string> = { accept: 'text/event-stream' };
    if (this.#lastEvent) headers['last-event-id'] = this.#lastEvent;
    const response = await this.#fetch('GET', '/api/v1/events', { signal, headers });
    onOpen();
    if (!response.body) return;
    for await (const message of readSse(response.body)) {
      if (message.id) this.#lastEvent = message.id;
      onEvent(JSON.parse(message.data) as ServerEvent);
    }
  }

  async #fetch(
    method: string,
    path: string,
    init: { query?: Query; body?: unknown; signal?: AbortSignal; headers?: HeadersInit } = {},
  ): Promise<Response> {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(init.query ?? {})) {
      if (value !== undefined && value !== '' && value !== false) query.set(key, String(value));
    }
    const headers = new Headers(init.headers);
    if (this.#token) headers.set('authorization', `Bearer ${this.#token}`);
    const raw = init.body instanceof Blob;
    if (init.body !== undefined) {
      headers.set('content-type', raw ? 'application/x-ndjson' : 'application/json');
    }
    const suffix = query.size > 0 ? `?${query}` : '';
    let response: Response;
    try {
      response = await fetch(`${this.url}${path}${suffix}`, {
        method,
        headers,
        body: raw ? (init.body as Blob) : JSON.stringify(init.body),
        signal: init.signal,
        cache: 'no-store',
      });
    } catch (cause) {
      if (init.signal?.aborted) throw cause;
      throw ApiError.unreachable(cause);
    }
    if (!response.ok) throw await ApiError.from(response);
    return response;
  }

  async #json<T>(method: string, path: string, body?: unknown, query?: Query): Promise<T> {
    return (await (await this.#fetch(method, path, { body, query })).json()) as T;
  }

  #get<T>(path: string, query?: Query): Promise<T> {
    return this.#json<T>('GET', path, undefined, query);
  }

  async #send(method: string, path: string, body?: unknown): Promise<void> {
    const response = await this.#fetch(method, path, { body });
    await response.body?.cancel();
  }
}
