/** The shapes of the control API as the screens use them. Times are milliseconds since the epoch. */

export type Rating = 'up' | 'down';

export interface Status {
  version: string;
  uptime_s: number;
  recording: boolean;
  model: {
    name: string;
    context_length: number;
    state: 'loading' | 'ready' | 'failed' | 'none';
    error?: string | null;
  };
  worker: { state: string; pid?: number | null; restarts: number; last_crash?: string | null };
  adapter: { live: string; candidate?: string | null };
  training: {
    state: 'collecting' | 'waiting' | 'training' | 'checking' | 'paused' | 'off';
    /** One sentence: why no training runs at this moment. */
    reason: string;
    fresh_labels: number;
    needed_labels: number;
    run_id?: number | null;
    progress?: number | null;
    eta_s?: number | null;
  };
  counts: {
    steps: number;
    unrated: number;
    rated: number;
    up: number;
    down: number;
    sessions: number;
  };
  connect: {
    base_url: string;
    openai_url: string;
    token_hint: string;
    first_request_at?: number | null;
  };
  policy: { schedule: string; dial: string };
  disk: { free_bytes: number; recording_stopped?: boolean | null };
}

export interface StepSummary {
  uid: string;
  session: string;
  trajectory: string;
  turn: number;
  kind: 'main' | 'side';
  kind_reason?: string | null;
  adapter: string;
  client?: string | null;
  user_text: string;
  answer_text: string;
  rating: Rating | null;
  reward?: number | null;
  reasons: string[];
  note?: string | null;
  correction?: string | null;
  used_in_run?: number | null;
  dropped_reason?: string | null;
  in_next_lesson: boolean;
  finish_reason?: string | null;
  prompt_tokens: number;
  response_tokens: number;
  created_at: number;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Message {
  role: string;
  content: string | null;
  reasoning?: string | null;
  tool_calls?: ToolCall[] | null;
  tool_call_id?: string | null;
  name?: string | null;
}

export interface RewardRow {
  /** Null withdraws the earlier value of this source. */
  value: number | null;
  source: string;
  created_at: number;
  note?: string | null;
  reasons?: string[];
}

export interface StepDetail extends StepSummary {
  messages: Message[];
  response: { content: string | null; reasoning?: string | null; tool_calls?: ToolCall[] | null };
  sampling: Record<string, unknown>;
  logprobs: number[];
  rewards: RewardRow[];
  response_ids: number[];
}

export interface Page<T> {
  items: T[];
  next_cursor?: string | null;
}

export interface SessionSummary {
  uid: string;
  title: string;
  client?: string | null;
  steps: number;
  rated: number;
  last_at: number;
}

export interface SessionDetail extends SessionSummary {
  items: StepSummary[];
}

export interface Verdict {
  promoted: boolean;
  reasons: string[];
  evaluation: Record<string, unknown>;
}

export type RunState =
  'queued' | 'training' | 'checking' | 'paused' | 'done' | 'failed' | 'cancelled' | string;

/** Mean log-probability per token of what a run learned from, before and after it. */
export interface Changes {
  liked_before?: number | null;
  liked_after?: number | null;
  disliked_before?: number | null;
  disliked_after?: number | null;
}

export interface Run {
  id: number;
  /** Any state without an end time is active. */
  state: string;
  parent?: string | null;
  version?: string | null;
  started_at: number;
  ended_at?: number | null;
  progress: number;
  eta_s?: number | null;
  phase?: string | null;
  estimator: string;
  /** Why that estimator. */
  estimator_reason?: string | null;
  /** `full`, or `response` when the prompt was read without a gradient. */
  grad_scope?: string | null;
  dial: string;
  config: Record<string, unknown>;
  steps_used: number;
  steps_dropped: { reason: string; count: number }[];
  changes?: Changes | null;
  verdict?: Verdict | null;
  error?: string | null;
}

export interface Series {
  name: string;
  points: [number, number][];
}

export interface GlossaryEntry {
  name: string;
  title: string;
  unit: string;
  explanation: string;
  normal: string;
}

export interface Adapter {
  version: string;
  parent?: string | null;
  state: 'live' | 'kept' | 'rejected' | 'candidate' | 'imported';
  run_id?: number | null;
  /** Null for the base model, which was there from the start. */
  created_at: number | null;
  steps_used: number;
  metrics: Record<string, unknown>;
  verdict?: Verdict | null;
  approval?: { up: number; down: number } | null;
  pinned: boolean;
  size_bytes: number;
}

export type Fit = 'fits' | 'tight' | 'no';

export interface Model {
  name: string;
  title: string;
  source: string;
  licence: string;
  size_bytes: number;
  context_length: number;
  parameters: number;
  state: 'available' | 'downloading' | 'paused' | 'verifying' | 'installed' | 'failed' | 'active';
  progress?: { done: number; total: number; bytes_per_s: number; eta_s?: number | null } | null;
  error?: string | null;
  fits: { serve: Fit; train: Fit; formula: string };
}

export interface Hardware {
  gpu?: { name: string; total_bytes: number; free_bytes: number; driver?: string } | null;
  cpu_cores?: number;
  ram_bytes?: number;
  ram_free_bytes?: number;
  disk_free_bytes?: number;
  [key: string]: unknown;
}

export interface Models {
  items: Model[];
  hardware: Hardware;
}

export interface Setting {
  key: string;
  value: unknown;
  default: unknown;
  source: 'default' | 'database' | 'environment' | 'command line' | string;
  restart_required: boolean;
  title: string;
  description: string;
  kind: string;
  options?: string[] | null;
}

export interface Check {
  name: string;
  ok: boolean;
  level: 'info' | 'warn' | 'error' | string;
  message: string;
  advice?: string | null;
}

export interface OpenClawGuide {
  snippet: unknown;
  commands: string[];
}

/** What forgetting removed, and which adapters had already learned from it. */
export interface Forgotten {
  steps: number;
  adapters: string[];
}

export interface RatingChange {
  rating: Rating | null;
  reasons?: string[];
  note?: string;
  correction?: string;
}

export type ExportFormat = 'peft' | 'gguf-lora' | 'merged-safetensors' | 'merged-gguf' | 'ollama';

export type EventKind =
  'status' | 'step' | 'rating' | 'run' | 'metric' | 'adapter' | 'download' | 'alert';

export interface ServerEvent {
  type: EventKind;
  [key: string]: unknown;
}

export interface ChatMessage {
  role: 'system' | 'user' | 'assistant';
  content: string;
}

export interface ChatChunk {
  content?: string;
  reasoning?: string;
  finish?: string;
}

export interface ChatAnswer {
  step: string | null;
  adapter: string | null;
}
