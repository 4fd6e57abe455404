"""Load published weights into inference engines: transformers, vLLM, verl and SGLang.

``module_follower.ModuleFollower`` updates a plain torch module, such as a model of transformers.
``vllm_plugin.register`` names the weight-transfer engine "hybridcomp" to vLLM, ``verl_engine`` is
verl's ``custom_backend_module``, and ``sglang_loader.load`` is SGLang's custom weight loader. Each
of these modules imports its engine, so this package imports none of them.
"""
