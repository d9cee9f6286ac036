import DOMPurify from 'dompurify';
import { Marked } from 'marked';

/**
 * Model text is hostile. Raw HTML is shown as the text it is, images become their description, and
 * what marked produces is still sanitised against a closed list of tags and attributes.
 */
const escape = (text: string) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({ gfm: true, breaks: true, async: false });
marked.use({
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ text, href }) => `<em>[${escape(text || href)}]</em>`,
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

const ALLOWED_TAGS = [
  'a',
  'blockquote',
  'br',
  'code',
  'del',
  'em',
  'h1',
  'h2',
  'h3',
  'h4',
  'h5',
  'h6',
  'hr',
  'li',
  'ol',
  'p',
  'pre',
  'strong',
  'table',
  'tbody',
  'td',
  'th',
  'thead',
  'tr',
  'ul',
];

export function renderMarkdown(text: string): string {
  const html = marked.parse(text) as string;
  const clean = DOMPurify.sanitize(html, {
    ALLOWED_TAGS,
    ALLOWED_ATTR: ['href', 'start', 'align'],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of clean.querySelectorAll('a')) {
    if (!link.hasAttribute('href')) continue;
    link.setAttribute('rel', 'noopener noreferrer');
    link.setAttribute('target', '_blank');
  }
  // A box that scrolls must be reachable by keyboard.
  for (const box of clean.querySelectorAll('pre')) box.setAttribute('tabindex', '0');
  const holder = document.createElement('div');
  holder.append(clean);
  return holder.innerHTML;
}
