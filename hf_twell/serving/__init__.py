"""`hf-twell serve`: one model behind OpenAI's API, by Transformers' own handlers of requests or by vLLM's server.

`vllm_plugin` is what vLLM itself loads, with or without this command.
"""
