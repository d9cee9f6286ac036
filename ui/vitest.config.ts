import { fileURLToPath } from 'node:url';
import { defineConfig } from 'vitest/config';

const path = (relative: string) => fileURLToPath(new URL(relative, import.meta.url));

/** Apart from the build's plugins, which watch files and keep the process from ending. */
export default defineConfig({
  resolve: { alias: { $lib: path('./src/lib'), $paraglide: path('./src/paraglide') } },
  test: { include: ['tests/unit/**/*.test.ts'] },
});
