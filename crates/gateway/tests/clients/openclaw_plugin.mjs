// The OpenClaw plugin, driven by the hook events that OpenClaw was seen to fire, against a gateway.
// Arguments: the gateway's address, its token, the plugin's folder, a completion id and a trace id.
import assert from 'node:assert';
import { pathToFileURL } from 'node:url';

const [url, token, folder, id, traceId] = process.argv.slice(2);
const { parseFeedback, register } = await import(pathToFileURL(`${folder}/feedback.ts`));

assert.deepEqual(parseFeedback('👍🏽'), { rating: 'up' });
assert.deepEqual(parseFeedback('👎 because too long'), { rating: 'down', note: 'too long' });
assert.deepEqual(parseFeedback('👎 the answer should be: Bern'), { rating: 'down', correction: 'Bern' });
assert.deepEqual(parseFeedback('Telegram reaction added: 👍 by Al on msg 42'), { rating: 'up', about: '42' });
assert.equal(parseFeedback('👍 now write a poem'), null);
assert.equal(parseFeedback('hello'), null);

const hooks = {};
const commands = {};
register({
  config: { models: { providers: { spotter: { baseUrl: `${url}/v1`, apiKey: token } } } },
  pluginConfig: {},
  on: (name, handler) => (hooks[name] = handler),
  registerCommand: (command) => (commands[command.name] = command.handler),
  logger: { warn: (text) => assert.fail(text) },
});
const context = { sessionKey: 'agent:main:main', trace: { traceId } };
const read = async () => {
  const step = id.replace('chatcmpl-', '');
  const response = await fetch(`${url}/api/v1/steps/${step}`, { headers: { authorization: `Bearer ${token}` } });
  return response.json();
};

assert.match((await commands.good({ sessionKey: 'agent:main:main' })).text, /no answer/);
hooks.llm_output({ lastAssistant: { responseId: id } }, context);
hooks.message_sent({ success: true, messageId: '42' }, context);
await hooks.message_received({ content: '👎 because too long', replyToId: '42' }, context);
assert.deepEqual([(await read()).rating, (await read()).note], ['down', 'too long']);
await hooks.message_received({ content: 'Telegram reaction added: 👍 by Al on msg 42' }, context);
assert.equal((await read()).rating, 'up');
await hooks.message_received({ content: '👎', replyToId: 'another message' }, context);
assert.equal((await read()).rating, 'up', 'a reply to something else rates nothing');
assert.match((await commands.bad({ sessionKey: 'agent:main:main', args: 'the answer should be Bern' })).text, /noted/);
assert.deepEqual([(await read()).rating, (await read()).correction], ['down', 'Bern']);
// Without a completion id the trace id joins.
hooks.llm_output({ lastAssistant: {} }, context);
await commands.good({ sessionKey: 'agent:main:main' });
assert.equal((await read()).rating, 'up');
console.log('ok');
