"""Transformers' own model tests, on the custom classes; `test_transformers_suite.py` runs it beside their sources."""

import unittest

import torch

from hf_twell import TwellLlamaForCausalLM, TwellQwen2ForCausalLM, TwellQwen3ForCausalLM
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor


class ModelTester:
    """What the suite asks of a model: a small config and inputs."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 32, 2, 4
    is_training = True

    def __init__(self, config_class):
        self.config_class = config_class

    def get_config(self):
        return self.config_class(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def prepare_config_and_inputs_for_model_class(self, model_class):
        return self.prepare_config_and_inputs_for_common()


class Suite(ModelTesterMixin, GenerationTesterMixin):
    def setUp(self):
        self.model_tester = ModelTester(self.all_model_classes[0].config_class)


class LlamaTest(Suite, unittest.TestCase):
    all_model_classes = all_generative_model_classes = (TwellLlamaForCausalLM,)


class Qwen2Test(Suite, unittest.TestCase):
    all_model_classes = all_generative_model_classes = (TwellQwen2ForCausalLM,)


class Qwen3Test(Suite, unittest.TestCase):
    all_model_classes = all_generative_model_classes = (TwellQwen3ForCausalLM,)
