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
