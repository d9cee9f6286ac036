-- Text and JSON stored once, whoever refers to it.
CREATE TABLE content (
    id INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE session (
    uid TEXT PRIMARY KEY,
    client TEXT NOT NULL,
    title TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_at INTEGER NOT NULL
) STRICT;
CREATE INDEX session_last ON session (last_at);

CREATE TABLE trajectory (
    uid TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    prompt_uid TEXT NOT NULL,
    channel TEXT NOT NULL CHECK (channel IN ('train', 'val')),
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'abandoned')),
    metadata TEXT,
    created_at INTEGER NOT NULL,
    last_at INTEGER NOT NULL
) STRICT;
CREATE INDEX trajectory_group ON trajectory (prompt_uid);

CREATE TABLE step (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    uid TEXT NOT NULL UNIQUE,
    session TEXT NOT NULL REFERENCES session (uid),
    trajectory TEXT NOT NULL REFERENCES trajectory (uid),
    prompt_uid TEXT NOT NULL,
    turn TEXT NOT NULL,
    idx INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('main', 'side')),
    kind_reason TEXT NOT NULL,
    kind_by_user INTEGER NOT NULL DEFAULT 0,
    adapter INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    -- The prompt is the first `prompt_prefix` tokens of the parent's prompt and response,
    -- then `prompt_suffix`; its messages likewise.
    parent INTEGER REFERENCES step (id) ON DELETE RESTRICT,
    depth INTEGER NOT NULL,
    prompt_prefix INTEGER NOT NULL,
    prompt_suffix BLOB NOT NULL,
    messages_prefix INTEGER NOT NULL,
    messages_suffix BLOB NOT NULL,
    response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    model_logprobs BLOB NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    sampling TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    first_token_ms INTEGER NOT NULL,
    total_ms INTEGER NOT NULL,
    client TEXT NOT NULL,
    user_text TEXT NOT NULL,
    answer_text TEXT NOT NULL,
    answer_hash BLOB NOT NULL,
    -- The request without its messages, as content.
    request INTEGER NOT NULL REFERENCES content (id),
    response TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- What the rewards of this step come to; the rows in `reward` are the truth.
    rating TEXT CHECK (rating IN ('up', 'down')),
    reward REAL,
    reward_source TEXT,
    correction TEXT,
    -- fresh → claimed by a run → used | dropped
    learning TEXT NOT NULL DEFAULT 'fresh' CHECK (learning IN ('fresh', 'claimed', 'used', 'dropped')),
    run INTEGER,
    drop_reason TEXT
) STRICT;
CREATE INDEX step_session ON step (session, id);
CREATE INDEX step_trajectory ON step (trajectory, idx);
CREATE INDEX step_answer ON step (session, answer_hash);
CREATE INDEX step_turn ON step (turn);
CREATE INDEX step_unrated ON step (id) WHERE rating IS NULL AND kind = 'main';
CREATE INDEX step_learning ON step (learning, id) WHERE reward IS NOT NULL;
CREATE INDEX step_parent ON step (parent) WHERE parent IS NOT NULL;

CREATE VIRTUAL TABLE step_text USING fts5 (
    user_text, answer_text, content = 'step', content_rowid = 'id', tokenize = 'trigram'
);
CREATE TRIGGER step_text_insert AFTER INSERT ON step BEGIN
    INSERT INTO step_text (rowid, user_text, answer_text)
    VALUES (new.id, new.user_text, new.answer_text);
END;
CREATE TRIGGER step_text_delete AFTER DELETE ON step BEGIN
    INSERT INTO step_text (step_text, rowid, user_text, answer_text)
    VALUES ('delete', old.id, old.user_text, old.answer_text);
END;

-- Append-only: withdrawing a vote is a row with a NULL value.
CREATE TABLE reward (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step TEXT REFERENCES step (uid) ON DELETE CASCADE,
    trajectory TEXT REFERENCES trajectory (uid) ON DELETE CASCADE,
    value REAL CHECK (value BETWEEN -1 AND 1),
    source TEXT NOT NULL,
    reasons TEXT NOT NULL,
    note TEXT,
    correction TEXT,
    created_at INTEGER NOT NULL,
    CHECK ((step IS NULL) <> (trajectory IS NULL))
) STRICT;
CREATE INDEX reward_step ON reward (step);
CREATE INDEX reward_trajectory ON reward (trajectory);

CREATE TABLE adapter (
    version INTEGER PRIMARY KEY,
    parent INTEGER,
    state TEXT NOT NULL CHECK (state IN ('candidate', 'live', 'kept', 'rejected', 'imported')),
    run INTEGER,
    dir TEXT NOT NULL,
    base_model TEXT NOT NULL,
    steps_used INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    verdict TEXT,
    pinned INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE run (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL,
    parent INTEGER NOT NULL,
    version INTEGER,
    -- Everything else the API shows of a run, as JSON.
    detail TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at INTEGER
) STRICT;

CREATE TABLE run_metric (
    run INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (run, name, step)
) STRICT, WITHOUT ROWID;

-- Which step was used by which run, or why it was dropped.
CREATE TABLE run_step (
    run INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step TEXT NOT NULL REFERENCES step (uid) ON DELETE CASCADE,
    outcome TEXT NOT NULL CHECK (outcome IN ('used', 'dropped')),
    reason TEXT,
    PRIMARY KEY (run, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX run_step_step ON run_step (step);

CREATE TABLE setting (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;
