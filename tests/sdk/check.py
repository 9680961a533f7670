"""The vendors' own SDKs against the proxy, with only another address and a token.

Usage: check.py URL TOKEN MODEL. The model has to answer each call as in the providers' tests: a thought, a
text, and a call of `code_interpreter`. Started by the test `official_sdks_work`, when
CONSTRUCT_TEST_SDK_PYTHON names a Python with both SDKs.
"""

import sys

import anthropic
import openai

url, token, model = sys.argv[1:4]
schema = {"type": "object", "properties": {"code": {"type": "string"}}}
TEXT, TOOL = "Let me see — 😀.", "code_interpreter"
made = 0


def check(holds, what):
    if not holds:
        raise SystemExit(f"wrong: {what}")


client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
check(model in [entry.id for entry in client.models.list()], "models of openai")

messages = [{"role": "user", "content": "go"}]
tools = [{"type": "function", "function": {"name": TOOL, "parameters": schema}}]
answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
message = answer.choices[0].message
check(message.content == TEXT and message.tool_calls[0].function.name == TOOL, "chat completions")
check(answer.choices[0].finish_reason == "tool_calls" and answer.usage.completion_tokens == 90, "chat completions' end")
text, name, usage = "", None, None
for chunk in client.chat.completions.create(
    model=model, messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name = call.function.name or name
check((text, name, usage.completion_tokens) == (TEXT, TOOL, 90), "streamed chat completions")
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}]
check(client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message.content == TEXT, "result")

tools = [{"type": "function", "name": TOOL, "parameters": schema, "strict": False}]
answer = client.responses.create(model=model, input="go", tools=tools)
call = next(item for item in answer.output if item.type == "function_call")
check(answer.output_text == TEXT and call.name == TOOL and answer.usage.output_tokens == 90, "responses")
with client.responses.stream(model=model, input="go", tools=tools) as stream:
    deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    final = stream.get_final_response()
check(deltas == TEXT and final.output_text == TEXT and final.status == "completed", "streamed responses")
result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
history = [{"role": "user", "content": "go"}, *[item.to_dict() for item in answer.output], result]
check(client.responses.create(model=model, input=history, tools=tools).output_text == TEXT, "result of responses")

client = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)
check(model in [entry.id for entry in client.models.list()], "models of anthropic")
messages = [{"role": "user", "content": "go"}]
tools = [{"name": TOOL, "input_schema": schema}]
answer = client.messages.create(model=model, max_tokens=500, messages=messages, tools=tools)
kinds = [block.type for block in answer.content]
check(kinds == ["thinking", "text", "tool_use"] and answer.stop_reason == "tool_use", f"messages: {kinds}")
check(answer.usage.output_tokens == 90 and answer.usage.cache_read_input_tokens == 500, "usage of messages")
with client.messages.stream(model=model, max_tokens=500, messages=messages, tools=tools) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
check(text == TEXT and final.content[2].input == answer.content[2].input, "streamed messages")
check(final.usage.output_tokens == 90, "usage of streamed messages")
messages += [
    {"role": "assistant", "content": final.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": final.content[2].id, "content": "7"}]},
]
check(client.messages.create(model=model, max_tokens=500, messages=messages, tools=tools).stop_reason == "tool_use", "result")

for kind, wrong in ((openai, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)), (anthropic, anthropic.Anthropic(base_url=url, api_key="x", max_retries=0))):
    try:
        wrong.models.list()
        check(False, "a wrong token")
    except kind.AuthenticationError:
        pass
try:
    client.messages.create(model="elsewhere", max_tokens=5, messages=[{"role": "user", "content": "go"}])
    check(False, "a model that is not there")
except anthropic.NotFoundError as error:
    check("elsewhere" in str(error), str(error))
print("the SDKs work")
