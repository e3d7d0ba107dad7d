"""vLLM's render-only server, whose chat template can be replaced while it runs: `POST /template` with its source, as if
`--chat-template` had named it. Takes vLLM's own flags.
"""

import uvloop
from starlette.requests import Request
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.render import entry
from vllm.utils.argparse_utils import FlexibleArgumentParser

build_plain_app = entry.build_app


def build_app(args, tasks):
    app = build_plain_app(args, tasks)

    @app.post("/template")
    async def replace_template(request: Request):
        renderer = app.state.online_renderer
        renderer.chat_template = (await request.body()).decode()
        # What a server decides at its start, for /v1/messages.
        merges = AnthropicServingMessages._should_merge_inline_system(renderer)
        app.state.serving_render._merge_inline_system = merges
        return {}

    return app


entry.build_app = build_app
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
validate_parsed_serve_args(arguments)
uvloop.run(entry.run_launch_fastapi(arguments))
