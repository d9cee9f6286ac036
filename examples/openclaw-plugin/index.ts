import { definePluginEntry } from 'openclaw/plugin-sdk/plugin-entry';

import { register } from './feedback.ts';

export default definePluginEntry({
  id: 'spotter-feedback',
  name: 'Spotter feedback',
  description: 'Rates the answers that Spotter gave: 👍 and 👎 in replies, /good and /bad.',
  register,
});
