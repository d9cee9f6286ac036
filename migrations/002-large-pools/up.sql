-- Position of the turn in its conversation, from 1.
ALTER TABLE step ADD COLUMN turn_no INTEGER NOT NULL DEFAULT 1;
ALTER TABLE session ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;
UPDATE step SET turn_no = numbered.n
FROM (
    SELECT session, turn, row_number() OVER (PARTITION BY session ORDER BY first) AS n
    FROM (SELECT session, turn, min(id) AS first FROM step GROUP BY session, turn)
) AS numbered
WHERE step.session = numbered.session AND step.turn = numbered.turn;
UPDATE session SET turns = coalesce((SELECT max(turn_no) FROM step WHERE step.session = session.uid), 0);

-- How many steps name this text themselves; at 0 the row goes.
ALTER TABLE content ADD COLUMN refs INTEGER NOT NULL DEFAULT 0;

-- What trigrams cannot find: single and paired characters that are not ASCII, short words.
ALTER TABLE step ADD COLUMN short_terms TEXT NOT NULL DEFAULT '';
CREATE VIRTUAL TABLE step_short USING fts5 (
    short_terms, content = 'step', content_rowid = 'id', detail = none,
    tokenize = 'unicode61 remove_diacritics 0'
);
CREATE TRIGGER step_short_insert AFTER INSERT ON step BEGIN
    INSERT INTO step_short (rowid, short_terms) VALUES (new.id, new.short_terms);
END;
CREATE TRIGGER step_short_delete AFTER DELETE ON step BEGIN
    INSERT INTO step_short (step_short, rowid, short_terms) VALUES ('delete', old.id, old.short_terms);
END;
-- A deleted row leaves nothing in the index.
INSERT INTO step_text (step_text) VALUES ('rebuild');
INSERT INTO step_text (step_text, rank) VALUES ('secure-delete', 1);
INSERT INTO step_short (step_short, rank) VALUES ('secure-delete', 1);

-- Totals, so that no page counts a million rows.
CREATE TABLE tally (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    steps INTEGER NOT NULL,
    unrated INTEGER NOT NULL,
    up INTEGER NOT NULL,
    down INTEGER NOT NULL
) STRICT;
INSERT INTO tally
SELECT 1, count(*), count(*) FILTER (WHERE rating IS NULL AND kind = 'main'),
    count(*) FILTER (WHERE rating = 'up'), count(*) FILTER (WHERE rating = 'down')
FROM step;
CREATE TRIGGER tally_insert AFTER INSERT ON step BEGIN
    UPDATE tally SET steps = steps + 1,
        unrated = unrated + (new.rating IS NULL AND new.kind = 'main'),
        up = up + (new.rating IS 'up'), down = down + (new.rating IS 'down');
END;
CREATE TRIGGER tally_delete AFTER DELETE ON step BEGIN
    UPDATE tally SET steps = steps - 1,
        unrated = unrated - (old.rating IS NULL AND old.kind = 'main'),
        up = up - (old.rating IS 'up'), down = down - (old.rating IS 'down');
END;
CREATE TRIGGER tally_update AFTER UPDATE OF rating, kind ON step BEGIN
    UPDATE tally SET
        unrated = unrated - (old.rating IS NULL AND old.kind = 'main') + (new.rating IS NULL AND new.kind = 'main'),
        up = up - (old.rating IS 'up') + (new.rating IS 'up'),
        down = down - (old.rating IS 'down') + (new.rating IS 'down');
END;

CREATE INDEX step_session_turn ON step (session, turn);
CREATE INDEX step_session_rated ON step (session) WHERE rating IS NOT NULL;
CREATE INDEX step_rating ON step (rating, id) WHERE rating IS NOT NULL;
CREATE INDEX step_approval ON step (adapter, rating) WHERE rating IS NOT NULL AND kind = 'main';
CREATE INDEX step_created ON step (created_at);
CREATE INDEX trajectory_session ON trajectory (session);

-- Attempts at one prompt that a client announced. A group is ready when every expected
-- attempt has ended, or when it was silent past its deadline.
ALTER TABLE trajectory ADD COLUMN announced INTEGER NOT NULL DEFAULT 0;
CREATE TABLE prompt_group (
    uid TEXT PRIMARY KEY,
    expected INTEGER NOT NULL,
    ready INTEGER NOT NULL DEFAULT 0,
    last_at INTEGER NOT NULL
) STRICT;
CREATE INDEX prompt_group_waiting ON prompt_group (last_at) WHERE ready = 0;
CREATE INDEX trajectory_open ON trajectory (last_at) WHERE state = 'open' AND announced = 1;

-- How often something was not kept or not learned from, and why.
CREATE TABLE drop_count (
    reason TEXT PRIMARY KEY,
    n INTEGER NOT NULL,
    last_at INTEGER NOT NULL
) STRICT;
INSERT INTO drop_count (reason, n, last_at)
SELECT reason, count(*), 0 FROM run_step WHERE outcome = 'dropped' AND reason IS NOT NULL GROUP BY reason;
