// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import type { Fit, Model, Run, StepSummary } from '../../src/lib/api/types';
import { recommended } from '../../src/features/models/fit';
import { consequence } from '../../src/features/review/consequence';
import { isActive, outcome } from '../../src/features/training/runs';
import { bytes, duration, figure } from '../../src/lib/text/format';

const model = (name: string, parameters: number, serve: Fit, train: Fit) =>
  ({ name, parameters, fits: { serve, train, formula: '' } }) as Model;

describe('the recommended model', () => {
  it('is the largest that fits for serving and for training', () => {
    const models = [
      model('small', 1e8, 'fits', 'fits'),
      model('middle', 6e8, 'fits', 'fits'),
      model('large', 2e9, 'fits', 'tight'),
      model('huge', 8e9, 'no', 'no'),
    ];
    expect(recommended(models)?.name).toBe('middle');
  });

  it('is none when nothing can be served', () => {
    expect(recommended([model('huge', 8e9, 'no', 'no')])).toBeUndefined();
  });
});

describe('what a vote did', () => {
  const step = (more: Partial<StepSummary>) => ({ rating: 'up', ...more }) as StepSummary;

  it('is told by its strongest effect', () => {
    expect(consequence(step({ used_in_run: 12 }))).toContain('run 12');
    expect(consequence(step({ dropped_reason: 'too far away' }))).toContain('too far away');
    expect(consequence(step({ in_next_lesson: true }))).toBe('In the next lesson.');
    expect(consequence(step({}))).toBe('Saved.');
  });

  it('is nothing without a vote or a correction', () => {
    expect(consequence(step({ rating: null, in_next_lesson: true }))).toBeNull();
  });
});

describe('a run', () => {
  const run = (more: Partial<Run>) => ({ id: 1, state: 'training', ...more }) as Run;

  it('is active until it has an end, also while it is paused', () => {
    expect(isActive(run({}))).toBe(true);
    expect(isActive(run({ state: 'paused' }))).toBe(true);
    expect(isActive(run({ state: 'promoted', ended_at: 5 }))).toBe(false);
  });

  it('is never told by colour alone', () => {
    const verdict = { promoted: false, reasons: [], evaluation: {} };
    const rejected = outcome(run({ state: 'rejected', ended_at: 5, verdict }));
    expect(rejected).toEqual({ word: 'Rejected', tone: 'rejected' });
    expect(outcome(run({ state: 'cancelled', ended_at: 5 })).word).toBe('Cancelled');
  });
});

describe('figures', () => {
  it('keep three digits, a real minus and no NaN', () => {
    expect(figure(-0.12345)).toBe('−0.123');
    expect(figure(148.6)).toBe('149');
    expect(figure(0.00001234)).toBe('1.2e−5');
    expect(figure(Number.NaN)).toBe('–');
  });

  it('carry units', () => {
    expect(bytes(98_000_000)).toBe('98 MB');
    expect(bytes(1_280_000_000)).toBe('1.3 GB');
    expect(duration(125)).toBe('2 min 5 sec');
    expect(duration(3_600)).toBe('1 hr');
  });
});
