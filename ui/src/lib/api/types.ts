/**
 * The shapes of the control API, from the description the daemon publishes. Where it says "text" and
 * means one of a few words, the words are named here. Times are milliseconds since the epoch.
 */
import type { components } from './generated';

type Schemas = components['schemas'];

/** A schema with some of its fields narrowed. */
type With<T, Narrow> = Omit<T, keyof Narrow> & Narrow;

export type Status = With<
  Schemas['Status'],
  {
    model: With<Schemas['ModelStatus'], { state: 'loading' | 'ready' | 'failed' | 'none' }>;
    training: With<
      Schemas['TrainingStatus'],
      { state: 'collecting' | 'waiting' | 'training' | 'checking' | 'paused' | 'off' }
    >;
  }
>;

export type Rating = Schemas['Rating'];
export type StepKind = 'main' | 'side';
export type StepSummary = With<
  Schemas['StepSummary'],
  { kind: StepKind; rating: Rating | null; reasons: string[] }
>;
export type ToolCall = Schemas['MessageToolCall'];
export type Message = With<Schemas['StoredMessage'], { role: string; content: string }>;
export type StepDetail = StepSummary &
  Pick<Schemas['StepDetail'], 'sampling' | 'logprobs' | 'rewards' | 'response_ids'> & {
    messages: Message[];
    response: Message;
  };
export type RatingChange = Partial<Schemas['RatingChange']> & { rating: Rating | null };
export type Forgotten = Schemas['Forgotten'];
export type ImportedData = Schemas['ImportedData'];

export interface Page<T> {
  items: T[];
  next_cursor?: string | null;
}

export type SessionSummary = Schemas['SessionSummary'];
export type SessionDetail = With<Schemas['SessionDetail'], { steps: StepSummary[] }>;

export type Verdict = With<Schemas['Verdict'], { evaluation: Record<string, unknown> }>;
export type Run = With<
  Schemas['Run'],
  { config: Record<string, unknown>; verdict?: Verdict | null }
>;
export type Series = With<Schemas['Series'], { points: [number, number][] }>;
export type GlossaryEntry = Schemas['GlossaryItem'];

export type Adapter = With<
  Schemas['Adapter'],
  {
    state: 'live' | 'kept' | 'rejected' | 'candidate' | 'imported';
    /** Null for the base model, which was there from the start. */
    created_at: number | null;
    verdict?: Verdict | null;
  }
>;
export type ExportFormat = 'peft' | 'gguf-lora' | 'merged-safetensors' | 'merged-gguf' | 'ollama';
export type Exported = Schemas['Exported'];

export type Fit = 'fits' | 'tight' | 'no';
export type Model = With<
  Schemas['Model'],
  {
    state: 'available' | 'downloading' | 'paused' | 'verifying' | 'installed' | 'failed' | 'active';
    fits: With<Schemas['Fits'], { serve: Fit; train: Fit }>;
  }
>;

/** The machine as the daemon found it; what it could not find is absent. */
export interface Hardware {
  gpus?: { name: string; memory_bytes: number; memory_free_bytes: number }[];
  cores?: number;
  memory_bytes?: number;
}

export interface Models {
  items: Model[];
  hardware: Hardware | null;
}

export type Setting = With<Schemas['Setting'], { value: unknown; default: unknown }>;
export type Check = Schemas['Check'];
export type ConnectGuide = With<Schemas['ConnectGuide'], { snippet: unknown }>;

export type EventKind = ServerEvent['type'];
export type ServerEvent = Schemas['EventBody'];

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
