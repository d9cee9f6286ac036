// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import { belongsToInputMethod, isCommand, isPlainEnter } from '../../src/lib/text/keys';

const press = (init: KeyboardEventInit & { keyCode?: number }) => {
  const event = new KeyboardEvent('keydown', { bubbles: true, ...init });
  if (init.keyCode) Object.defineProperty(event, 'keyCode', { value: init.keyCode });
  return event;
};

describe('input methods', () => {
  it('do not send the message with the Enter that picks a candidate', () => {
    expect(isPlainEnter(press({ key: 'Enter' }))).toBe(true);
    expect(isPlainEnter(press({ key: 'Enter', isComposing: true }))).toBe(false);
    expect(isPlainEnter(press({ key: 'Enter', keyCode: 229 }))).toBe(false);
    expect(isPlainEnter(press({ key: 'Enter', shiftKey: true }))).toBe(false);
  });

  it('are recognised by either sign', () => {
    expect(belongsToInputMethod(press({ key: 'a', isComposing: true }))).toBe(true);
    expect(belongsToInputMethod(press({ key: 'Process', keyCode: 229 }))).toBe(true);
    expect(belongsToInputMethod(press({ key: 'a' }))).toBe(false);
  });
});

describe('single-key commands', () => {
  it('stay out of text fields and dialogs', () => {
    const field = document.createElement('textarea');
    document.body.append(field);
    const typed = press({ key: '1' });
    field.dispatchEvent(typed);
    expect(isCommand(typed)).toBe(false);

    const free = press({ key: '1' });
    document.body.dispatchEvent(free);
    expect(isCommand(free)).toBe(true);

    const dialog = document.createElement('div');
    dialog.setAttribute('role', 'dialog');
    document.body.append(dialog);
    expect(isCommand(free)).toBe(false);
    dialog.remove();
    field.remove();
  });

  it('leave shortcuts of the system alone', () => {
    for (const modifier of ['ctrlKey', 'metaKey', 'altKey']) {
      const event = press({ key: '1', [modifier]: true });
      document.body.dispatchEvent(event);
      expect(isCommand(event)).toBe(false);
    }
  });
});
