/**
 * Whether a key press belongs to an input method. WebKit ends the composition before it reports the
 * Enter that ended it, so `isComposing` alone is not enough; such a press still has key code 229.
 */
export function belongsToInputMethod(event: KeyboardEvent): boolean {
  return event.isComposing || event.keyCode === 229;
}

/** Enter that means "send": no modifier, and not the Enter that picks a candidate. */
export function isPlainEnter(event: KeyboardEvent): boolean {
  return (
    event.key === 'Enter' &&
    !event.shiftKey &&
    !event.ctrlKey &&
    !event.metaKey &&
    !event.altKey &&
    !belongsToInputMethod(event)
  );
}

/** Whether the press goes into a text field, where single letters are text and not commands. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.target;
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || target.matches('input, textarea, select, [role="combobox"]'))
  );
}

/** A single-key command: no modifier, no text field, no input method, no open dialog. */
export function isCommand(event: KeyboardEvent): boolean {
  return (
    !event.defaultPrevented &&
    !event.ctrlKey &&
    !event.metaKey &&
    !event.altKey &&
    !belongsToInputMethod(event) &&
    !isTyping(event) &&
    !document.querySelector('[role="dialog"], [role="alertdialog"]')
  );
}
