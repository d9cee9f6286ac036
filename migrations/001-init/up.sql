CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE trajectory (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,
    session_id INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    prompt_uid TEXT NOT NULL,
    channel TEXT NOT NULL CHECK (channel IN ('train', 'val')),
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'abandoned')),
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX trajectory_prompt ON trajectory(prompt_uid);
CREATE INDEX trajectory_session ON trajectory(session_id);

CREATE TABLE step (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,
    trajectory_id INTEGER NOT NULL REFERENCES trajectory(id) ON DELETE CASCADE,
    content BLOB NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX step_trajectory ON step(trajectory_id);

-- Append-only: withdrawing a vote is a new row.
CREATE TABLE reward (
    id INTEGER PRIMARY KEY,
    step_id INTEGER NOT NULL REFERENCES step(id) ON DELETE CASCADE,
    content TEXT NOT NULL
) STRICT;
CREATE INDEX reward_step ON reward(step_id);
