export interface Question {
  title: string;
  body: string;
  action: string;
  danger?: boolean;
}

class Confirmation {
  question = $state.raw<Question | null>(null);
  #answer: ((yes: boolean) => void) | null = null;

  ask(question: Question): Promise<boolean> {
    this.#answer?.(false);
    this.question = question;
    return new Promise((resolve) => (this.#answer = resolve));
  }

  answer(yes: boolean): void {
    this.question = null;
    this.#answer?.(yes);
    this.#answer = null;
  }
}

export const confirmation = new Confirmation();
export const confirm = (question: Question) => confirmation.ask(question);
