// The official OpenAI package for JavaScript against a gateway over a scripted engine.
import assert from 'node:assert';
import OpenAI from 'openai';

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: 'user', content: 'hi' }];

const whole = await client.chat.completions.create({ model: 'spotter', messages });
assert.equal(whole.choices[0].message.content, 'Hello from the script.');

let text = '';
const stream = await client.chat.completions.create({ model: 'spotter', messages, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? '';
assert.equal(text, 'Hello from the script.');

const cities = [];
const runner = client.chat.completions.runTools({
  model: 'spotter',
  stream: true,
  messages,
  tools: [
    {
      type: 'function',
      function: {
        name: 'get_weather',
        parameters: { type: 'object', properties: { city: { type: 'string' } } },
        parse: JSON.parse,
        function: ({ city }) => {
          cities.push(city);
          return 'sunny';
        },
      },
    },
  ],
});
assert.equal(await runner.finalContent(), 'Hello from the script.');
assert.deepEqual(cities, ['Zurich']);

const response = await client.responses.create({ model: 'spotter', input: 'hi' });
assert.equal(response.output_text, 'Hello from the script.');
const kinds = [];
for await (const event of await client.responses.create({ model: 'spotter', input: 'hi', stream: true })) {
  kinds.push(event.type);
}
assert.equal(kinds[0], 'response.created');
assert.equal(kinds.at(-1), 'response.completed');

const parsed = await client.chat.completions.parse({
  model: 'spotter',
  messages,
  response_format: {
    type: 'json_schema',
    json_schema: { name: 'P', strict: true, schema: { type: 'object', properties: {} } },
  },
});
assert.deepEqual(parsed.choices[0].message.parsed, { name: 'Ada', age: 36 });
console.log('ok');
