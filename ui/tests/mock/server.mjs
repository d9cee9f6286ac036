// A stand-in for the daemon with the same JSON, for working on the UI and for its tests.
// node tests/mock/server.mjs [--port 8199] [--scenario normal|first|empty|loading|failed|training] [--bulk 10000]
import { createReadStream, existsSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { GLOSSARY, MODELS, SETTINGS, buildData, series } from './data.mjs';

const DIST = fileURLToPath(new URL('../../dist', import.meta.url));
// The daemon's header; the page's own policy is stricter, and a browser applies both.
const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const TYPES = {
  '.html': 'text/html',
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
  '.woff2': 'font/woff2',
};

export function createMock({
  token = 'mock-token',
  scenario = 'normal',
  bulk = 0,
  runSeconds = 20,
} = {}) {
  const empty = scenario === 'empty' || scenario === 'first';
  const { sessions, steps } = empty ? { sessions: [], steps: [] } : buildData({ bulk });
  const now = Date.now();
  const hour = 3_600_000;
  const models = structuredClone(MODELS);
  if (scenario === 'first') for (const model of models) model.state = 'available';
  const settings = structuredClone(SETTINGS);
  const started = now - 8_040_000;
  const verdict = (promoted, reasons, before, after) => ({
    promoted,
    reasons,
    evaluation: {
      margin_before: before,
      margin_after: after,
      held_out: [6, 4],
      probe_base: 2.41,
      probe_before: 2.42,
      probe_after: promoted ? 2.42 : 2.98,
      entropy_before: 1.62,
      entropy_after: promoted ? 1.57 : 0.91,
      repetition_before: 0.02,
      repetition_after: promoted ? 0.02 : 0.19,
      kl_to_base: promoted ? 0.031 : 0.144,
    },
  });
  const changes = {
    liked_before: -1.21,
    liked_after: -0.97,
    disliked_before: -0.88,
    disliked_after: -1.36,
    items: [],
  };
  const config = {
    learning_rate: 1e-5,
    kl_target: 0.02,
    epochs: 2,
    clip: 0.2,
    lora_rank: 16,
    grad_scope: 'full',
  };
  const runs = empty
    ? []
    : [
        {
          id: 3,
          state: 'promoted',
          parent: 'v2',
          version: 'v3',
          started_at: now - 5 * hour,
          ended_at: now - 5 * hour + 184_000,
          progress: 1,
          eta_s: null,
          estimator: 'binary',
          estimator_reason: 'There are too few ratings yet for the critic to help.',
          grad_scope: 'full',
          changes,
          dial: 'bold',
          config: { ...config, learning_rate: 5e-5 },
          steps_used: 17,
          steps_dropped: [{ reason: 'stale', count: 2 }],
          verdict: verdict(
            false,
            [
              'The skills texts surprise it more: 2.98 nats per token against 2.42.',
              'Answers repeat themselves: 19 % of 4-grams, against 2 % before.',
            ],
            0.21,
            0.24,
          ),
          error: null,
        },
        {
          id: 2,
          state: 'promoted',
          parent: 'v1',
          version: 'v2',
          started_at: now - 26 * hour,
          ended_at: now - 26 * hour + 161_000,
          progress: 1,
          eta_s: null,
          estimator: 'binary',
          estimator_reason: 'There are too few ratings yet for the critic to help.',
          grad_scope: 'full',
          changes,
          dial: 'normal',
          config,
          steps_used: 18,
          steps_dropped: [{ reason: 'no_logprobs', count: 1 }],
          verdict: verdict(true, ['Held-out margin rose from 0.06 to 0.21.'], 0.06, 0.21),
          error: null,
        },
        {
          id: 1,
          state: 'promoted',
          parent: 'base',
          version: 'v1',
          started_at: now - 50 * hour,
          ended_at: now - 50 * hour + 149_000,
          progress: 1,
          eta_s: null,
          estimator: 'binary',
          estimator_reason: 'There are too few ratings yet for the critic to help.',
          grad_scope: 'full',
          changes,
          dial: 'normal',
          config,
          steps_used: 16,
          steps_dropped: [],
          verdict: verdict(true, ['Held-out margin rose from 0.00 to 0.06.'], 0, 0.06),
          error: null,
        },
      ];
  const metrics = { 1: series(64, 11), 2: series(72, 12), 3: series(68, 13) };
  const adapters = empty
    ? [
        {
          version: 'base',
          parent: null,
          state: 'live',
          run_id: null,
          created_at: started,
          steps_used: 0,
          metrics: {},
          verdict: null,
          approval: null,
          pinned: false,
          size_bytes: 0,
        },
      ]
    : [
        {
          version: 'v3',
          parent: 'v2',
          state: 'rejected',
          run_id: 3,
          created_at: now - 5 * hour + 184_000,
          steps_used: 17,
          metrics: {},
          verdict: runs[0].verdict,
          approval: null,
          pinned: false,
          size_bytes: 19_600_000,
        },
        {
          version: 'v2',
          parent: 'v1',
          state: 'live',
          run_id: 2,
          created_at: now - 26 * hour + 161_000,
          steps_used: 18,
          metrics: {},
          verdict: runs[1].verdict,
          approval: { up: 31, down: 6 },
          pinned: true,
          size_bytes: 19_600_000,
        },
        {
          version: 'v1',
          parent: 'base',
          state: 'kept',
          run_id: 1,
          created_at: now - 50 * hour + 149_000,
          steps_used: 16,
          metrics: {},
          verdict: runs[2].verdict,
          approval: { up: 14, down: 9 },
          pinned: false,
          size_bytes: 19_600_000,
        },
        {
          version: 'base',
          parent: null,
          state: 'kept',
          run_id: null,
          created_at: now - 60 * hour,
          steps_used: 0,
          metrics: {},
          verdict: null,
          approval: { up: 6, down: 11 },
          pinned: false,
          size_bytes: 0,
        },
      ];
  let live = empty ? 'base' : 'v2';
  let recording = true;
  let trainingPaused = false;
  let fresh = empty ? 0 : 9;
  let firstRequest = empty ? null : now - 55 * hour;
  let active = null;

  const clients = new Set();
  let eventId = 0;
  const log = [];
  const emit = (type, data = {}) => {
    eventId += 1;
    const line = `id: ${eventId}\ndata: ${JSON.stringify({ type, ...data })}\n\n`;
    log.push([eventId, line]);
    if (log.length > 200) log.shift();
    for (const response of clients) response.write(line);
  };

  const training = () => {
    if (trainingPaused && !active) return ['paused', 'You paused training.'];
    if (active)
      return [
        active.state === 'checking' ? 'checking' : 'training',
        active.state === 'checking'
          ? 'The new adapter is compared with the live one on answers it has not seen.'
          : 'A lesson is running.',
      ];
    if (['failed', 'loading', 'first'].includes(scenario)) return ['off', 'No model is loaded.'];
    if (fresh < 16)
      return ['collecting', `${16 - fresh} more ratings are needed for the next lesson.`];
    return [
      'waiting',
      'Your agent is active; training starts when it has been quiet for five minutes.',
    ];
  };
  const status = () => {
    const counted = steps.filter((s) => s.kind === 'main');
    const [state, reason] = training();
    const model = {
      normal: 'ready',
      training: 'ready',
      empty: 'ready',
      loading: 'loading',
      failed: 'failed',
      first: 'none',
    }[scenario];
    return {
      version: '0.1.0',
      uptime_s: Math.round((Date.now() - started) / 1000),
      recording,
      model: {
        name: 'smollm2-135m-instruct',
        context_length: 8192,
        state: model,
        error:
          model === 'failed'
            ? 'The file smollm2-135m-instruct.gguf ends after 61 of 98 MB. Download it again; what was recorded is safe.'
            : null,
      },
      worker: {
        state: model === 'ready' ? 'running' : model === 'failed' ? 'stopped' : 'starting',
        pid: 4242,
        restarts: 0,
        last_crash: null,
      },
      adapter: { live, candidate: active?.state === 'checking' ? active.version : null },
      training: {
        state,
        reason,
        fresh_labels: fresh,
        needed_labels: 16,
        run_id: active?.id ?? null,
        progress: active?.progress ?? null,
        eta_s: active?.eta_s ?? null,
      },
      counts: {
        steps: steps.length,
        unrated: counted.filter((s) => !s.rating).length,
        rated: counted.filter((s) => s.rating).length,
        up: counted.filter((s) => s.rating === 'up').length,
        down: counted.filter((s) => s.rating === 'down').length,
        sessions: sessions.length,
      },
      connect: {
        base_url: 'http://127.0.0.1:8100',
        openai_url: 'http://127.0.0.1:8100/v1',
        token_hint: 'sp-…7f3a',
        first_request_at: firstRequest,
      },
      policy: {
        schedule: settings.find((s) => s.key === 'training.schedule').value,
        dial: settings.find((s) => s.key === 'training.dial').value,
      },
      disk: { free_bytes: 212_400_000_000, recording_stopped: false },
    };
  };

  const summary = (step) => {
    const { messages, response, sampling, logprobs, rewards, response_ids, ...rest } = step;
    return {
      ...rest,
      answer_text: rest.answer_text.slice(0, 400),
      user_text: rest.user_text.slice(0, 400),
    };
  };
  const sessionSummary = (session) => {
    const own = session.archived ? null : steps.filter((s) => s.session === session.uid);
    return own
      ? {
          ...session,
          steps: own.length,
          rated: own.filter((s) => s.rating).length,
          last_at: own.at(-1)?.created_at ?? now,
        }
      : {
          uid: session.uid,
          title: session.title,
          client: session.client,
          steps: session.uid === 'bulk000000' ? 500 : 3,
          rated: 0,
          last_at: session.last_at,
        };
  };
  const page = (items, url) => {
    const limit = Number(url.searchParams.get('limit') ?? 50);
    const from = Number(url.searchParams.get('cursor') ?? 0);
    return {
      items: items.slice(from, from + limit),
      next_cursor: from + limit < items.length ? String(from + limit) : null,
    };
  };

  const startRun = () => {
    const id = runs.length + 1;
    const version = `v${adapters.filter((a) => a.version !== 'base').length + 1}`;
    active = {
      id,
      state: 'training',
      parent: live,
      version: null,
      started_at: Date.now(),
      ended_at: null,
      progress: 0,
      eta_s: runSeconds,
      estimator: 'binary',
      estimator_reason: 'There are too few ratings yet for the critic to help.',
      grad_scope: 'full',
      changes,
      dial: 'normal',
      config,
      steps_used: fresh,
      steps_dropped: [{ reason: 'stale', count: 1 }],
      verdict: null,
      error: null,
    };
    runs.unshift(active);
    const all = series(80, 99);
    metrics[id] = all.map((s) => ({ ...s, points: [] }));
    let tick = 0;
    const total = runSeconds * 4;
    const timer = setInterval(() => {
      if (!active || active.id !== id) return clearInterval(timer);
      if (trainingPaused) {
        active.state = 'paused';
        return;
      }
      tick += 1;
      active.progress = Math.min(1, tick / total);
      active.eta_s = Math.max(0, Math.round((total - tick) / 4));
      active.state = active.progress > 0.85 ? 'checking' : 'training';
      active.version = active.state === 'checking' ? version : null;
      const seen = Math.min(80, Math.ceil((active.progress / 0.85) * 80));
      metrics[id] = all.map((s) => ({ ...s, points: s.points.slice(0, seen) }));
      emit('metric', { run_id: id });
      emit('status', status());
      if (tick < total) return;
      clearInterval(timer);
      const outcome = verdict(true, ['Held-out margin rose from 0.21 to 0.29.'], 0.21, 0.29);
      Object.assign(active, {
        state: 'promoted',
        ended_at: Date.now(),
        progress: 1,
        eta_s: null,
        version,
        verdict: outcome,
      });
      const before = adapters.find((a) => a.state === 'live');
      if (before) before.state = 'kept';
      adapters.unshift({
        version,
        parent: live,
        state: 'live',
        run_id: id,
        created_at: Date.now(),
        steps_used: active.steps_used,
        metrics: {},
        verdict: outcome,
        approval: { up: 0, down: 0 },
        pinned: false,
        size_bytes: 19_600_000,
      });
      live = version;
      for (const step of steps)
        if (step.in_next_lesson) Object.assign(step, { in_next_lesson: false, used_in_run: id });
      fresh = 0;
      active = null;
      emit('run', { run: runs.find((r) => String(r.id) === String(id)) });
      emit('adapter', { live });
      emit('status', status());
    }, 250);
    timer.unref();
    return id;
  };
  if (scenario === 'training') startRun();

  const routes = [
    ['GET', '/api/v1/status', () => status()],
    [
      'GET',
      '/api/v1/steps',
      (_, url) => {
        const q = url.searchParams.get('q')?.toLowerCase();
        const session = url.searchParams.get('session');
        let items = steps.filter((s) => !s.session.startsWith('bulk') || session);
        if (url.searchParams.get('unrated'))
          items = items.filter((s) => !s.rating && s.kind === 'main');
        if (session) items = items.filter((s) => s.session === session);
        if (q)
          items = items.filter((s) => `${s.user_text} ${s.answer_text}`.toLowerCase().includes(q));
        return page([...items].sort((a, b) => b.created_at - a.created_at).map(summary), url);
      },
    ],
    ['GET', '/api/v1/steps/:uid', ([uid]) => steps.find((s) => s.uid === uid)],
    [
      'PUT',
      '/api/v1/steps/:uid/rating',
      ([uid], _, body) => {
        const step = steps.find((s) => s.uid === uid);
        if (!step) return undefined;
        const had = step.rating;
        Object.assign(step, {
          rating: body.rating,
          reward: body.rating ? (body.rating === 'up' ? 1 : -1) : null,
          reasons: body.reasons ?? [],
          note: body.note ?? null,
          correction: body.correction ?? null,
          in_next_lesson: Boolean(body.rating),
        });
        step.rewards.push({ value: step.reward ?? 0, source: 'user', created_at: Date.now() });
        fresh += (body.rating ? 1 : 0) - (had ? 1 : 0);
        emit('rating', { step: summary(step) });
        emit('status', status());
        return summary(step);
      },
    ],
    [
      'PUT',
      '/api/v1/steps/:uid/kind',
      ([uid], _, body) =>
        Object.assign(steps.find((s) => s.uid === uid) ?? {}, { kind: body.kind }),
    ],
    [
      'DELETE',
      '/api/v1/steps/:uid',
      ([uid]) => (
        steps.splice(
          steps.findIndex((s) => s.uid === uid),
          1,
        ),
        { steps: 1, adapters: [] }
      ),
    ],
    [
      'GET',
      '/api/v1/sessions',
      (_, url) => {
        const q = url.searchParams.get('q')?.toLowerCase() ?? '';
        const items = sessions.filter(
          (s) =>
            s.title.toLowerCase().includes(q) ||
            steps.some((t) => t.session === s.uid && t.answer_text.toLowerCase().includes(q)),
        );
        return page(
          items.map(sessionSummary).sort((a, b) => b.last_at - a.last_at),
          url,
        );
      },
    ],
    [
      'GET',
      '/api/v1/sessions/:uid',
      ([uid]) => {
        const session = sessions.find((s) => s.uid === uid);
        return (
          session && {
            ...sessionSummary(session),
            steps: steps.filter((s) => s.session === uid).map(summary),
          }
        );
      },
    ],
    [
      'DELETE',
      '/api/v1/sessions/:uid',
      ([uid]) => {
        sessions.splice(
          sessions.findIndex((s) => s.uid === uid),
          1,
        );
        for (let i = steps.length - 1; i >= 0; i -= 1)
          if (steps[i].session === uid) steps.splice(i, 1);
        return { steps: 1, adapters: ['v2'] };
      },
    ],
    ['POST', '/api/v1/trajectories/:uid/outcome', () => ({})],
    [
      'POST',
      '/api/v1/training/runs',
      () =>
        active
          ? [409, 'busy', 'A lesson is already running.']
          : fresh < 8
            ? [
                409,
                'not_enough_labels',
                `${8 - fresh} more ratings are needed before a lesson can start.`,
              ]
            : [202, { id: startRun() }],
    ],
    ['GET', '/api/v1/training/runs', () => ({ items: runs })],
    ['GET', '/api/v1/training/runs/:id', ([id]) => runs.find((r) => String(r.id) === id)],
    ['GET', '/api/v1/training/runs/:id/metrics', ([id]) => metrics[id] && { series: metrics[id] }],
    [
      'POST',
      '/api/v1/training/runs/:id/cancel',
      ([id]) => {
        const run = runs.find((r) => String(r.id) === id);
        if (run && String(active?.id) === id) {
          Object.assign(run, { state: 'cancelled', ended_at: Date.now() });
          active = null;
          trainingPaused = false;
          emit('run', { run: runs.find((r) => String(r.id) === String(id)) });
          emit('status', status());
        }
        return run;
      },
    ],
    [
      'POST',
      '/api/v1/training/pause',
      () => {
        trainingPaused = true;
        emit('status', status());
        return {};
      },
    ],
    [
      'POST',
      '/api/v1/training/resume',
      () => {
        trainingPaused = false;
        emit('status', status());
        return {};
      },
    ],
    ['GET', '/api/v1/training/glossary', () => ({ items: GLOSSARY })],
    ['GET', '/api/v1/adapters', () => ({ live, items: adapters })],
    [
      'POST',
      '/api/v1/adapters/rollback',
      () => {
        const parent = adapters.find((a) => a.version === live)?.parent ?? 'base';
        return activate(parent);
      },
    ],
    [
      'POST',
      '/api/v1/adapters/import',
      (_, __, body) =>
        body.path?.startsWith('/')
          ? {}
          : [400, 'not_found', `There is no adapter at ${body.path}.`],
    ],
    ['POST', '/api/v1/adapters/prune', () => ({})],
    ['POST', '/api/v1/adapters/:version/activate', ([version]) => activate(version)],
    [
      'POST',
      '/api/v1/adapters/:version/export',
      ([version], _, body) => ({
        path: body.out ?? `/home/you/.local/share/spotter/exports/${version}-${body.format}`,
        bytes: 19_600_000,
      }),
    ],
    [
      'PUT',
      '/api/v1/adapters/:version/pin',
      ([version], _, body) =>
        Object.assign(adapters.find((a) => a.version === version) ?? {}, { pinned: body.pinned }),
    ],
    [
      'GET',
      '/api/v1/models',
      () => ({
        items: models,
        hardware: {
          gpu: null,
          cores: 8,
          memory_bytes: 16e9,
          ram_free_bytes: 9.2e9,
          disk_free_bytes: 212.4e9,
        },
      }),
    ],
    ['POST', '/api/v1/models/import', () => ({})],
    [
      'POST',
      '/api/v1/models/:name/pull',
      ([name]) => {
        const model = models.find((m) => m.name === name);
        if (!model) return undefined;
        Object.assign(model, {
          state: 'downloading',
          error: null,
          progress: model.progress ?? {
            done: 0,
            total: model.size_bytes,
            bytes_per_s: 24e6,
            eta_s: 20,
          },
        });
        const timer = setInterval(() => {
          if (model.state !== 'downloading') return clearInterval(timer);
          model.progress.done = Math.min(
            model.size_bytes,
            model.progress.done + model.size_bytes / 60,
          );
          model.progress.eta_s = Math.ceil((model.size_bytes - model.progress.done) / 24e6);
          if (model.progress.done >= model.size_bytes) {
            model.state = 'installed';
            model.progress = null;
          }
          emit('download', { name, state: models.find((m) => m.name === name)?.state });
        }, 250);
        timer.unref();
        return {};
      },
    ],
    [
      'POST',
      '/api/v1/models/:name/pause',
      ([name]) => {
        Object.assign(models.find((m) => m.name === name) ?? {}, { state: 'paused' });
        emit('download', { name, state: models.find((m) => m.name === name)?.state });
        return {};
      },
    ],
    [
      'POST',
      '/api/v1/models/:name/activate',
      ([name]) => {
        for (const m of models)
          m.state = m.name === name ? 'active' : m.state === 'active' ? 'installed' : m.state;
        return {};
      },
    ],
    [
      'DELETE',
      '/api/v1/models/:name',
      ([name]) => Object.assign(models.find((m) => m.name === name) ?? {}, { state: 'available' }),
    ],
    ['GET', '/api/v1/settings', () => ({ items: settings })],
    [
      'PATCH',
      '/api/v1/settings',
      (_, __, body) => {
        for (const [key, value] of Object.entries(body)) {
          const setting = settings.find((s) => s.key === key);
          if (!setting) return [400, 'invalid_request', `There is no setting ${key}.`];
          if (key === 'training.min_labels' && value < 8)
            return [400, 'invalid_request', 'Fresh ratings per lesson must be at least 8.'];
          Object.assign(setting, { value, source: 'database' });
        }
        emit('status', status());
        return { items: settings };
      },
    ],
    [
      'GET',
      '/api/v1/doctor',
      () => ({
        checks: [
          {
            name: 'Database',
            ok: true,
            level: 'info',
            message: 'Readable, 4.2 MB, no damage found.',
          },
          {
            name: 'Model file',
            ok: scenario !== 'failed',
            level: scenario === 'failed' ? 'error' : 'info',
            message:
              scenario === 'failed' ? 'Ends after 61 of 98 MB.' : 'Complete; the checksum matches.',
            advice: scenario === 'failed' ? 'Download it again on the Models page.' : null,
          },
          {
            name: 'GPU',
            ok: false,
            level: 'warn',
            message: 'No NVIDIA driver found; the model runs on the processor.',
            advice: 'Training works, about ten times slower than on a GPU.',
          },
          {
            name: 'Keychain',
            ok: false,
            level: 'warn',
            message: 'No keychain answers; the token is in a file only you can read.',
          },
        ],
      }),
    ],
    ['GET', '/api/v1/token', () => ({ token: 'sp-3d1c9b7e5a2f4086917f3a' })],
    [
      'POST',
      '/api/v1/recording',
      (_, __, body) => {
        recording = !body.paused;
        emit('status', status());
        return {};
      },
    ],
    [
      'GET',
      '/api/v1/connect/claude-code',
      () => ({
        snippet: {
          env: {
            ANTHROPIC_BASE_URL: 'http://127.0.0.1:8100',
            ANTHROPIC_AUTH_TOKEN: '${SPOTTER_TOKEN}',
          },
        },
        commands: ['spotter connect claude-code --dry-run', 'spotter connect claude-code'],
      }),
    ],
    ['GET', '/api/v1/data/export', () => ({ uid: 'one' })],
    ['POST', '/api/v1/data/import', () => ({ imported: 1, errors: [] })],
    ['DELETE', '/api/v1/data', () => ({ steps: steps.splice(0).length, adapters: ['v1', 'v2'] })],
    [
      'GET',
      '/api/v1/connect/openclaw',
      () => ({
        snippet: {
          models: {
            providers: {
              spotter: {
                baseUrl: 'http://127.0.0.1:8100/v1',
                apiKey: '${SPOTTER_TOKEN}',
                api: 'openai-completions',
                models: [{ id: 'spotter', name: 'Spotter', contextWindow: 8192 }],
              },
            },
          },
          agents: { defaults: { model: { primary: 'spotter/spotter' } } },
        },
        commands: ['spotter connect openclaw --dry-run', 'spotter connect openclaw'],
      }),
    ],
  ];
  function activate(version) {
    const next = adapters.find((a) => a.version === version);
    if (!next) return undefined;
    for (const a of adapters) if (a.state === 'live') a.state = 'kept';
    next.state = 'live';
    live = version;
    emit('adapter', { live });
    emit('status', status());
    return {};
  }
  const compiled = routes.map(([method, pattern, handler]) => [
    method,
    new RegExp(`^${pattern.replace(/:\w+/g, '([^/]+)')}$`),
    handler,
  ]);

  const send = (response, code, value) => {
    response.writeHead(code, { 'content-type': 'application/json' });
    response.end(JSON.stringify(value));
  };
  const refuse = (response, code, name, message) =>
    send(response, code, { error: { code: name, message } });

  return createServer(async (request, response) => {
    const url = new URL(request.url, 'http://127.0.0.1');
    if (url.pathname === '/healthz') return send(response, 200, { ok: true });
    if (!url.pathname.startsWith('/api/') && !url.pathname.startsWith('/v1/')) {
      const file = join(DIST, normalize(url.pathname === '/' ? '/index.html' : url.pathname));
      if (!file.startsWith(DIST) || !existsSync(file) || !statSync(file).isFile())
        return refuse(response, 404, 'not_found', 'No such page.');
      response.writeHead(200, {
        'content-type': TYPES[extname(file)] ?? 'application/octet-stream',
        'content-security-policy': POLICY,
        'x-content-type-options': 'nosniff',
      });
      return createReadStream(file).pipe(response);
    }
    if (request.headers.authorization !== `Bearer ${token}`)
      return refuse(response, 401, 'unauthorized', 'The token is missing or wrong.');
    if (url.pathname === '/api/v1/events') {
      response.writeHead(200, { 'content-type': 'text/event-stream', 'cache-control': 'no-store' });
      const last = Number(request.headers['last-event-id'] ?? 0);
      for (const [id, line] of log) if (last && id > last) response.write(line);
      response.write(`data: ${JSON.stringify({ type: 'status', ...status() })}\n\n`);
      clients.add(response);
      request.on('close', () => clients.delete(response));
      return undefined;
    }
    let raw = '';
    for await (const chunk of request) raw += chunk;
    const json = (request.headers['content-type'] ?? '').includes('application/json');
    const body = raw && json ? JSON.parse(raw) : {};
    if (url.pathname === '/v1/chat/completions') {
      firstRequest ??= Date.now();
      const adapter = body.model === 'spotter' ? live : body.model.split(':')[1];
      const uid = `0199f2c4a1b2c3d4e5f6${String(880000 + steps.length).padStart(12, '0')}`;
      const prompt = body.messages.at(-1).content;
      const answer = `A short answer from ${adapter === 'base' ? 'the base model' : adapter}: start with the smallest part that can fail, then widen.`;
      steps.push({
        ...structuredClone(buildData().steps[0]),
        uid,
        session: 'ses-chat',
        adapter,
        client: 'Spotter',
        user_text: prompt,
        answer_text: answer,
        rating: null,
        used_in_run: null,
        created_at: Date.now(),
      });
      response.writeHead(200, {
        'content-type': 'text/event-stream',
        'x-spotter-step': uid,
        'x-spotter-adapter': adapter,
      });
      for (const word of answer.split(/(?<= )/)) {
        response.write(
          `data: ${JSON.stringify({ choices: [{ delta: { content: word }, finish_reason: null }] })}\n\n`,
        );
        await new Promise((resolve) => setTimeout(resolve, 24));
      }
      response.write(
        `data: ${JSON.stringify({ choices: [{ delta: {}, finish_reason: 'stop' }] })}\n\ndata: [DONE]\n\n`,
      );
      emit('step', { step: summary(steps.at(-1)) });
      return response.end();
    }
    for (const [method, pattern, handler] of compiled) {
      const match = pattern.exec(url.pathname);
      if (method !== request.method || !match) continue;
      const answer = handler(match.slice(1).map(decodeURIComponent), url, body);
      if (answer === undefined)
        return refuse(response, 404, 'not_found', `There is nothing at ${url.pathname}.`);
      if (Array.isArray(answer) && typeof answer[1] === 'string')
        return refuse(response, ...answer);
      return Array.isArray(answer) ? send(response, ...answer) : send(response, 200, answer);
    }
    return refuse(response, 404, 'not_found', `There is nothing at ${url.pathname}.`);
  });
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const option = (name, fallback) => {
    const at = process.argv.indexOf(`--${name}`);
    return at < 0 ? fallback : process.argv[at + 1];
  };
  const port = Number(option('port', 8199));
  const mock = createMock({
    scenario: option('scenario', 'normal'),
    bulk: Number(option('bulk', 0)),
    runSeconds: Number(option('run-seconds', 20)),
  });
  mock.listen(port, '127.0.0.1', () => console.log(`http://127.0.0.1:${port}/?token=mock-token`));
}
