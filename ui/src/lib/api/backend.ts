import type {
  Adapter,
  ChatAnswer,
  ChatChunk,
  ChatMessage,
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

export interface StepQuery {
  unrated?: boolean;
  session?: string;
  q?: string;
  cursor?: string;
  limit?: number;
}

export interface ChatRequest {
  model: string;
  messages: ChatMessage[];
  temperature?: number;
  signal?: AbortSignal;
  onChunk(chunk: ChatChunk): void;
  /** Called once, when the headers are there. */
  onAnswer?(answer: ChatAnswer): void;
}

/**
 * All the UI may ask of the daemon. Screens import this interface and nothing below it, so the
 * desktop window, a browser and the tests run the same code.
 */
export interface Backend {
  readonly url: string;

  status(): Promise<Status>;
  steps(query: StepQuery): Promise<Page<StepSummary>>;
  step(uid: string): Promise<StepDetail>;
  rate(uid: string, change: RatingChange): Promise<void>;
  setKind(uid: string, kind: 'main' | 'side'): Promise<void>;
  forgetStep(uid: string): Promise<Forgotten>;

  sessions(query: { q?: string; cursor?: string }): Promise<Page<SessionSummary>>;
  session(uid: string): Promise<SessionDetail>;
  forgetSession(uid: string): Promise<Forgotten>;
  outcome(trajectory: string, reward: number): Promise<void>;

  runs(): Promise<Run[]>;
  run(id: number): Promise<Run>;
  runMetrics(id: number, points: number): Promise<Series[]>;
  startRun(): Promise<{ id: number }>;
  pauseTraining(): Promise<void>;
  resumeTraining(): Promise<void>;
  cancelRun(id: number): Promise<void>;
  glossary(): Promise<GlossaryEntry[]>;

  adapters(): Promise<{ live: string; items: Adapter[] }>;
  activate(version: string): Promise<void>;
  rollback(): Promise<void>;
  exportAdapter(
    version: string,
    request: { format: ExportFormat; out?: string },
  ): Promise<{ path: string; bytes: number }>;
  importAdapter(path: string): Promise<void>;
  pin(version: string, pinned: boolean): Promise<void>;
  pruneAdapters(): Promise<void>;

  models(): Promise<Models>;
  pullModel(name: string): Promise<void>;
  pauseModel(name: string): Promise<void>;
  activateModel(name: string): Promise<void>;
  importModel(path: string): Promise<void>;
  removeModel(name: string): Promise<void>;

  settings(): Promise<Setting[]>;
  changeSetting(key: string, value: unknown): Promise<void>;
  doctor(): Promise<Check[]>;
  token(): Promise<string>;
  setRecording(paused: boolean): Promise<void>;
  connectGuide(client: string): Promise<ConnectGuide>;

  exportData(): Promise<Blob>;
  importData(lines: string): Promise<ImportedData>;
  forgetEverything(): Promise<Forgotten>;

  chat(request: ChatRequest): Promise<void>;
  /** Follows the event stream until the signal aborts; rejects when the connection is lost. */
  events(
    signal: AbortSignal,
    onOpen: () => void,
    onEvent: (event: ServerEvent) => void,
  ): Promise<void>;
}
