"""The official OpenAI and Anthropic packages against a gateway over a scripted engine.

The script answers every prompt with a tool call when tools are offered and no
result is there yet, with JSON when a schema is asked for, and with text otherwise.
"""

import sys

import anthropic
import openai
from pydantic import BaseModel

url, token = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
user = [{"role": "user", "content": "hi"}]
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Person(BaseModel):
    name: str
    age: int


raw = client.chat.completions.with_raw_response.create(model="spotter", messages=user)
whole = raw.parse()
assert whole.choices[0].message.content == "Hello from the script.", whole
assert whole.id == f"chatcmpl-{raw.headers['x-spotter-step']}"
assert whole.usage.prompt_tokens_details.cached_tokens > 0

text, usage = "", None
for chunk in client.chat.completions.create(
    model="spotter", messages=user, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
assert text == "Hello from the script." and usage.completion_tokens > 0

with client.chat.completions.stream(model="spotter", messages=user, tools=[weather]) as stream:
    final = stream.get_final_completion()
call = final.choices[0].message.tool_calls[0]
assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Zurich"}'), call
assert final.choices[0].finish_reason == "tool_calls"
history = user + [
    {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]},
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
after = client.chat.completions.create(model="spotter", messages=history, tools=[weather])
assert after.choices[0].message.content == "Hello from the script."

parsed = client.chat.completions.parse(model="spotter", messages=user, response_format=Person)
assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)

response = client.responses.create(model="spotter", input="hi")
assert response.output_text == "Hello from the script." and response.status == "completed"
followed = client.responses.create(model="spotter", input="more", previous_response_id=response.id)
assert followed.output_text == "Hello from the script."
assert client.responses.parse(model="spotter", input="hi", text_format=Person).output_parsed.name == "Ada"
flat = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
with client.responses.stream(model="spotter", input="hi", tools=[flat]) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_response()
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
assert final.output[0].type == "function_call" and final.output[0].arguments == '{"city":"Zurich"}'

completion = client.completions.create(model="spotter", prompt="Once", max_tokens=5)
assert completion.choices[0].text
assert {m.id for m in client.models.list()} >= {"spotter", "spotter:base"}
try:
    client.embeddings.create(model="spotter", input=["a"])
    raise AssertionError("embeddings are refused")
except openai.InternalServerError as error:
    assert error.status_code == 501
try:
    openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    raise AssertionError("a wrong key is refused")
except openai.AuthenticationError:
    pass

claude = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)
message = claude.messages.create(model="spotter", max_tokens=50, messages=user)
assert message.content[0].text == "Hello from the script." and message.stop_reason == "end_turn"
tool = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}
with claude.messages.stream(model="spotter", max_tokens=50, messages=user, tools=[tool]) as stream:
    final = stream.get_final_message()
use = final.content[-1]
assert (use.type, use.input, final.stop_reason) == ("tool_use", {"city": "Zurich"}, "tool_use")
answered = user + [
    {"role": "assistant", "content": [use.model_dump()]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
]
with claude.messages.stream(model="spotter", max_tokens=50, messages=answered, tools=[tool]) as stream:
    assert "".join(stream.text_stream) == "Hello from the script."
assert claude.messages.count_tokens(model="spotter", messages=user).input_tokens > 0
print("ok")
