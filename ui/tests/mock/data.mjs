// Deterministic content for the mock daemon: the same every start, so screenshots can be compared.
import { readFileSync } from 'node:fs';

const T0 = Date.now();
const MIN = 60_000;

/** A small seeded generator; Math.random would make every screenshot differ. */
export function lcg(seed) {
  let state = seed >>> 0;
  return () => (state = (state * 1664525 + 1013904223) >>> 0) / 2 ** 32;
}

const DIALOGUES = [
  [
    'OpenClaw',
    'Weekly report from the tracker',
    [
      [
        'Summarise what moved in the tracker this week.',
        'Three things moved this week.\n\n1. **Import** now resumes after a broken connection.\n2. The **export** screen lost its second confirmation.\n3. Two crashes on start were fixed, both from an empty settings file.\n\nNothing slipped. The search rewrite is still waiting for review.',
        true,
      ],
      [
        'Shorter. One sentence.',
        'Import resumes, export asks once, two start-up crashes are gone, and search still waits for review.',
      ],
    ],
  ],
  [
    'OpenClaw',
    'Why does the nightly backup take an hour?',
    [
      [
        'The nightly backup takes an hour since Monday. Find out why.',
        'The backup is slow because compression runs on one core.\n\nSince Monday `backup.conf` says `threads = 1`; it was `threads = 0` (all cores) before. Set it back:\n\n```ini\n[compression]\nthreads = 0\nlevel = 6\n```\n\nThe log agrees: 54 of 61 minutes are spent in the compressor.',
        true,
      ],
    ],
  ],
  [
    'Claude Code',
    'Rename the config loader',
    [
      [
        'Rename load_conf to read_settings everywhere.',
        'Certainly! I would be absolutely delighted to help you with that renaming task today. Renaming is an important part of keeping a code base healthy. I renamed `load_conf` to `read_settings` in 7 files. Please do not hesitate to let me know if there is anything else at all that I can do for you!',
        true,
      ],
    ],
  ],
  [
    'OpenClaw',
    '明天的会议安排',
    [
      [
        '明天下午有什么会议？',
        '明天下午有两个会议：\n\n- 14:00 设计评审（会议室 B，45 分钟）\n- 16:30 与小林的一对一\n\n两者之间有 105 分钟空闲。',
      ],
      ['把第二个会议改到周四同一时间。', '已将与小林的一对一改到周四 16:30，并通知了对方。', true],
    ],
  ],
  [
    'Python SDK',
    'Extract invoice fields',
    [
      [
        'Return the invoice number, date and total as JSON.',
        '{"number":"2026-1187","date":"2026-11-28","total":"418.20 EUR"}',
      ],
    ],
  ],
  [
    'OpenClaw',
    'A page that tries to break out',
    [
      [
        'What does the page at example.test say?',
        'The page says: <img src=x onerror="alert(1)"> <script>alert(2)</script> and links to [its shop](javascript:alert(3)).\n\n| item | price |\n| --- | --- |\n| lamp | 24 |\n| desk | 180 |',
      ],
    ],
  ],
  [
    'OpenClaw',
    'Plan a quiet Saturday in Lyon',
    [
      [
        'Plan a quiet Saturday in Lyon. No museums.',
        'Morning: walk the Croix-Rousse market before ten, then coffee on the Place Sathonay.\n\nAfternoon: the botanical garden in the Tête d’Or park, which is free, and the lake path if it is dry.\n\nEvening: one bouchon, early. Booking for seven is easier than for eight.',
      ],
      [
        'It will rain.',
        'Then swap the park for the covered passages between Rue Mercière and Saint-Nizier, and keep the rest.',
      ],
      ['Which bouchon?', 'Daniel et Denise on Rue Tupin; they answer the phone after three.'],
    ],
  ],
  [
    'nanobot',
    'Unit of the sensor readings',
    [
      [
        'Are these readings in Celsius or Fahrenheit?',
        'Celsius. The header of `readings.csv` names the column `temp_c`, and the values lie between 18 and 24, which in Fahrenheit would be below freezing.',
        true,
      ],
    ],
  ],
];

export function buildData({ bulk = 0 } = {}) {
  const sessions = [];
  const steps = [];
  let n = 0;
  DIALOGUES.forEach(([client, title, turns], s) => {
    const session = `ses${String(s + 1).padStart(4, '0')}`;
    const messages = [
      { role: 'system', content: 'You are a careful assistant. Runtime: agent=main host=desk' },
    ];
    turns.forEach(([user, answer, tool], t) => {
      n += 1;
      messages.push({ role: 'user', content: user });
      if (tool) {
        messages.push({
          role: 'assistant',
          content: null,
          reasoning: 'I should look before I answer.',
          tool_calls: [
            {
              id: `call${n}a`,
              name: 'read_file',
              arguments: JSON.stringify({ path: 'notes/week-48.md', limit: 40 }),
            },
          ],
        });
        messages.push({
          role: 'tool',
          tool_call_id: `call${n}a`,
          name: 'read_file',
          content:
            '# Week 48\n- import: resume\n- export: one confirmation\n- fix: two crashes on start',
        });
      }
      const created = T0 - (DIALOGUES.length - s) * 37 * MIN + t * 3 * MIN;
      const length = Math.max(8, Math.round(answer.length / 3.6));
      const random = lcg(n);
      steps.push({
        uid: `0199f2c4a1b2c3d4e5f6${String(n).padStart(12, '0')}`,
        session,
        trajectory: `trj${String(n).padStart(4, '0')}`,
        turn: t + 1,
        kind: 'main',
        kind_reason: null,
        adapter: s < 3 ? 'v1' : 'v2',
        client,
        user_text: user,
        answer_text: answer,
        rating: null,
        reward: null,
        reasons: [],
        note: null,
        correction: null,
        used_in_run: null,
        dropped_reason: null,
        in_next_lesson: false,
        finish_reason: 'stop',
        prompt_tokens: 180 + n * 37,
        response_tokens: length,
        created_at: created,
        messages: structuredClone(messages),
        response: {
          content: answer,
          reasoning: tool ? 'The file has what is asked for; answer from it.' : null,
          tool_calls: [],
        },
        sampling: { temperature: 0.7, top_p: 0.95 },
        logprobs: Array.from({ length }, () => -3 * random() ** 3),
        rewards: [],
        response_ids: Array.from({ length }, () => Math.floor(random() * 49000)),
      });
      messages.push({ role: 'assistant', content: answer });
    });
    sessions.push({ uid: session, title, client });
  });
  const vote = (i, rating, more = {}) =>
    Object.assign(steps[i], { rating, reward: rating === 'up' ? 1 : -1, ...more });
  vote(0, 'up', { used_in_run: 2, reasons: ['followed_instructions'] });
  vote(3, 'down', {
    used_in_run: 2,
    reasons: ['too_long'],
    correction: 'Renamed `load_conf` to `read_settings` in 7 files.',
  });
  vote(1, 'up', { in_next_lesson: true });
  vote(2, 'up', { used_in_run: 2 });
  steps.push({
    ...structuredClone(steps[4]),
    uid: '0199f2c4a1b2c3d4e5f6990000000001',
    kind: 'side',
    kind_reason: 'no tools and a one-line title prompt',
    user_text: 'Give this conversation a title of at most six words.',
    answer_text: 'Meetings for tomorrow',
    rating: null,
  });
  for (let i = 0; i < bulk; i += 1) {
    const uid = `bulk${String(i).padStart(6, '0')}`;
    sessions.push({
      uid,
      title: `Archived conversation ${i + 1}`,
      client: 'OpenClaw',
      archived: true,
      last_at: T0 - 86_400_000 - i * 90_000,
    });
    if (i === 0) {
      for (let t = 0; t < 500; t += 1) {
        steps.push({
          ...structuredClone(steps[t % 8]),
          uid: `deep${String(t).padStart(8, '0')}`,
          session: uid,
          turn: t + 1,
          rating: null,
          created_at: T0 - 90_000_000 + t * 1000,
        });
      }
    }
  }
  return { sessions, steps };
}

// The daemon serves the glossary of the core crate; the mock reads the same table.
const source = readFileSync(
  new URL('../../../crates/core/src/glossary.rs', import.meta.url),
  'utf8',
);
export const GLOSSARY = [...source.matchAll(/Term \{([^}]*)\}/g)]
  .map(([, body]) =>
    Object.fromEntries(
      [...body.matchAll(/(\w+): "((?:[^"\\]|\\.)*)"/g)].map(([, key, value]) => [key, value]),
    ),
  )
  .filter((entry) => entry.name);

export function series(steps, seed) {
  const random = lcg(seed);
  const noise = () => random() + random() - 1;
  const make = (name, at) => ({
    name,
    points: Array.from({ length: steps }, (_, i) => [i + 1, at(i / Math.max(1, steps - 1), i)]),
  });
  return [
    make('reward_mean', (x) => -0.3 + 0.8 * x + 0.18 * noise()),
    make('policy_loss', (x) => 0.04 - 0.05 * x + 0.03 * noise()),
    make('value_loss', (x) => 0.7 * Math.exp(-3 * x) + 0.12 + 0.05 * Math.abs(noise())),
    make('kl_to_base', (x) => 0.045 * x + 0.006 * Math.abs(noise())),
    make('entropy', (x) => 1.9 - 0.25 * x + 0.05 * noise()),
    make('clip_fraction', (x) => 0.05 + 0.06 * x + 0.02 * Math.abs(noise())),
    make(
      'gradient_norm',
      (x, i) => 0.5 + 0.2 * noise() + (i === Math.floor(steps * 0.62) ? 3.1 : 0),
    ),
    make('tokens_per_second', () => 148 + 8 * noise()),
  ];
}

export const MODELS = [
  [
    'smollm2-135m-instruct',
    'SmolLM2 135M Instruct',
    'HuggingFaceTB/SmolLM2-135M-Instruct',
    'Apache-2.0',
    98_000_000,
    8192,
    135e6,
    'active',
    'fits',
    'fits',
  ],
  [
    'qwen3-0.6b',
    'Qwen3 0.6B',
    'Qwen/Qwen3-0.6B-GGUF',
    'Apache-2.0',
    484_000_000,
    40960,
    6e8,
    'available',
    'fits',
    'fits',
  ],
  [
    'qwen3-1.7b',
    'Qwen3 1.7B',
    'Qwen/Qwen3-1.7B-GGUF',
    'Apache-2.0',
    1_280_000_000,
    40960,
    1.7e9,
    'installed',
    'fits',
    'tight',
  ],
  [
    'qwen3-4b',
    'Qwen3 4B',
    'Qwen/Qwen3-4B-GGUF',
    'Apache-2.0',
    2_500_000_000,
    40960,
    4e9,
    'available',
    'tight',
    'no',
  ],
  [
    'llama-3.1-8b-instruct',
    'Llama 3.1 8B Instruct',
    'meta-llama/Llama-3.1-8B-Instruct',
    'Llama 3.1 Community',
    4_920_000_000,
    131072,
    8e9,
    'available',
    'no',
    'no',
  ],
].map(
  ([
    name,
    title,
    source,
    licence,
    size_bytes,
    context_length,
    parameters,
    state,
    serve,
    train,
  ]) => ({
    name,
    title,
    source,
    licence,
    size_bytes,
    context_length,
    parameters,
    state,
    progress: null,
    error: null,
    fits: {
      serve,
      train,
      formula: `weights ${(size_bytes / 1e9).toFixed(2)} GB + cache 0.4 GB + working memory 0.3 GB; training adds ${((parameters * 0.18) / 1e9).toFixed(2)} GB`,
    },
  }),
);

export const SETTINGS = [
  [
    'gateway.host',
    '127.0.0.1',
    '127.0.0.1',
    'default',
    true,
    'Address',
    'The address the gateway listens on. Any other address than this machine needs a token.',
    'text',
  ],
  [
    'gateway.port',
    8100,
    8100,
    'command line',
    true,
    'Port',
    'The port agents connect to.',
    'integer',
  ],
  [
    'gateway.auth',
    true,
    true,
    'default',
    true,
    'Require the token',
    'Off is allowed on this machine only.',
    'boolean',
  ],
  [
    'training.schedule',
    'idle',
    'idle',
    'default',
    false,
    'When to train',
    'Training starts by itself when there are enough fresh ratings and this condition holds.',
    'choice',
    ['always', 'idle', 'schedule', 'manual'],
  ],
  [
    'training.dial',
    'normal',
    'normal',
    'default',
    false,
    'How boldly to learn',
    'Sets the learning rate, the distance to the base model and the number of passes together.',
    'choice',
    ['gentle', 'normal', 'bold'],
  ],
  [
    'training.min_labels',
    16,
    16,
    'default',
    false,
    'Fresh ratings per lesson',
    'At least 8. Fewer ratings teach faster and less surely.',
    'integer',
  ],
  [
    'model.context_length',
    8192,
    8192,
    'database',
    true,
    'Context length',
    'Tokens of conversation the model sees. More needs more memory.',
    'integer',
  ],
  [
    'privacy.redact',
    ['sk-[A-Za-z0-9]{20,}'],
    [],
    'database',
    false,
    'Redaction patterns',
    'Text that matches one of these is replaced before anything is stored.',
    'list',
  ],
  [
    'privacy.retention_days',
    0,
    0,
    'default',
    false,
    'Keep data for',
    'Days; 0 keeps everything. Rated answers that were not yet learned from are never dropped.',
    'integer',
  ],
  [
    'network.offline',
    false,
    false,
    'default',
    false,
    'Work offline',
    'No outgoing connection at all, also not for model downloads.',
    'boolean',
  ],
].map(([key, value, fallback, source, restart_required, title, description, kind, options]) => ({
  key,
  value,
  default: fallback,
  source,
  restart_required,
  title,
  description,
  kind,
  options: options ?? null,
}));
