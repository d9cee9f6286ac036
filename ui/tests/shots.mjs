// Screenshots of every screen: node tests/shots.mjs URL DIR [--themes light,dark] [--locales en] [--screens home,...]
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { SCREENS, launch, open, show } from './browser.mjs';

const [url, out] = process.argv.slice(2);
const option = (name, fallback) => {
  const at = process.argv.indexOf(`--${name}`);
  return (at < 0 ? fallback : process.argv[at + 1]).split(',');
};
mkdirSync(out, { recursive: true });
const browser = await launch();
for (const theme of option('themes', 'light,dark')) {
  for (const locale of option('locales', 'en')) {
    const { page, context, problems } = await open(browser, url, { theme, locale });
    for (const screen of option('screens', SCREENS.join())) {
      await show(page, screen);
      await page.screenshot({ path: join(out, `${screen}-${theme}-${locale}.png`) });
    }
    for (const problem of problems) console.log(problem);
    await context.close();
  }
}
await browser.close();
