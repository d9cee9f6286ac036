import type { Setting } from '$lib/api/types';
import { m } from '$paraglide/messages.js';

/** `gateway.port` belongs to the group `gateway`. */
export const groupOf = (key: string) =>
  key.includes('.') ? key.slice(0, key.indexOf('.')) : 'general';

const GROUPS: Record<string, () => string> = {
  gateway: m.group_gateway,
  server: m.group_gateway,
  training: m.group_training,
  train: m.group_training,
  model: m.group_model,
  serving: m.group_model,
  privacy: m.group_privacy,
  data: m.group_privacy,
  network: m.group_network,
  general: m.group_general,
};

export const groupTitle = (group: string) => GROUPS[group]?.() ?? group;

/** Title and description of a setting. The daemon gives both; known ones are in the reader's language. */
export function words(setting: Setting): { title: string; description: string } {
  return { title: setting.title || setting.key, description: setting.description };
}

const SOURCES: Record<string, () => string> = {
  environment: m.source_environment,
  'command line': m.source_command_line,
};

/** Where a fixed value comes from; null when it can be changed here. */
export const fixedBy = (setting: Setting): string | null => SOURCES[setting.source]?.() ?? null;
