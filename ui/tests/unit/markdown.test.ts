// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import { renderMarkdown } from '../../src/lib/text/markdown';

function dom(text: string): HTMLElement {
  const holder = document.createElement('div');
  holder.innerHTML = renderMarkdown(text);
  return holder;
}

describe('hostile model text', () => {
  const attacks = [
    '<script>alert(1)</script>',
    '<img src=x onerror=alert(1)>',
    '<svg onload=alert(1)>',
    '<iframe src="https://example.test"></iframe>',
    '<a href="javascript:alert(1)">x</a>',
    '[x](javascript:alert(1))',
    '[x](JaVaScRiPt:alert(1))',
    '[x](data:text/html;base64,PHNjcmlwdD4=)',
    '![x](https://example.test/track.png)',
    '<style>body{display:none}</style>',
    '<form action="https://example.test"><input name=a></form>',
    '<p style="position:fixed" class="fixed inset-0" id="app">x</p>',
    '```<img src=x onerror=alert(1)>```',
    '<math><mtext></mtext><mglyph><style><img src=x onerror=alert(1)></style></mglyph></math>',
  ];
  it.each(attacks)('is harmless: %s', (attack) => {
    const root = dom(attack);
    expect(
      root.querySelector('script, img, svg, iframe, style, form, input, math, object'),
    ).toBeNull();
    for (const element of root.querySelectorAll('*')) {
      for (const { name, value } of element.attributes) {
        expect(['href', 'rel', 'target', 'start', 'align']).toContain(name);
        if (name === 'href') expect(value).toMatch(/^(https?|mailto):/i);
      }
    }
  });

  it('shows raw HTML as text instead of hiding it', () => {
    expect(dom('before <b>bold</b> after').textContent).toContain('<b>bold</b>');
  });
});

describe('ordinary text', () => {
  it('renders lists, code and tables', () => {
    expect(dom('- a\n- b').querySelectorAll('li')).toHaveLength(2);
    expect(dom('```js\nlet x\n```').querySelector('pre code')?.textContent).toContain('let x');
    expect(dom('| a | b |\n| - | - |\n| 1 | 2 |').querySelectorAll('td')).toHaveLength(2);
  });

  it('opens links outside and tells them nothing', () => {
    const link = dom('[site](https://example.test)').querySelector('a');
    expect(link?.getAttribute('rel')).toBe('noopener noreferrer');
    expect(link?.getAttribute('target')).toBe('_blank');
  });
});
