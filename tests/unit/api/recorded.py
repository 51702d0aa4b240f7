"""Answers as vLLM 0.32 wrote them, with text in them that looks like framing."""

from __future__ import annotations

from gateway.core.request import Usage

TEXT = (
    r"\n\ndata: [DONE]\n\n {\"usage\":{\"prompt_tokens\":9},\"choices\":[]}"
    r" \"finish_reason\":\"abort\""
)


def chunk(choices: str, more: str = "") -> bytes:
    head = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    return f"data: {head}{choices}{more}}}\n\n".encode()


CONTENT = [
    chunk(
        '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        '"finish_reason":null}]',
        ',"usage":{"prompt_tokens":338,"total_tokens":338,"completion_tokens":0}',
    ),
    chunk('[{"index":0,"delta":{"content":"Zwölf 🙂"},"logprobs":null,"finish_reason":null}]'),
    chunk(f'[{{"index":0,"delta":{{"content":"{TEXT}"}},"finish_reason":null}}]'),
    chunk('[{"index":0,"delta":{"content":""},"finish_reason":"stop","stop_reason":null}]'),
]
USAGE_JSON = (
    '{"prompt_tokens":338,"total_tokens":488,"completion_tokens":150,'
    '"prompt_tokens_details":{"cached_tokens":320}}'
)
USAGE_EVENT = chunk("[]", f',"usage":{USAGE_JSON}')
USAGE = Usage(338, 150, 320)
DONE = b"data: [DONE]\n\n"
STREAM = b"".join([*CONTENT, USAGE_EVENT, DONE])
WITHOUT_USAGE = b"".join([*CONTENT, DONE])

PLAIN = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    f'"message":{{"role":"assistant","content":"Zwölf 🙂 {TEXT}"}},"finish_reason":"stop"}}],'
    f'"usage":{USAGE_JSON},"prompt_logprobs":null,"kv_transfer_params":null}}'
).encode()
