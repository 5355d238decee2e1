// What a decoder is, and what one of its steps is given.
//
// Born in Python (conch_kernels.cpu.native, the same fields in the same order).
#pragma once

#include "attention.h"
#include "likeliest.h"
#include "matrix.h"
#include "norm.h"

namespace conch {

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

struct Layer {
    Norm attention_in, query, key, attention_out, mlp_in, mlp_out;
    Matrix qkv;   // query heads, key heads, value heads
    Matrix out;
    Matrix up;    // gated: LANES gate columns and LANES up columns by turns
    Matrix down;
    AttentionConstants attention;
    const float* rope;  // [positions, rotary]: cosines, then sines, rotary / 2 of each
    int32_t window;     // tokens that a query sees, itself included; 0 for all before it
    int32_t reserved;
};

// How a head that drafts joins states with the embeddings of tokens; see entry.h.
struct Entry {
    Matrix fusing;            // from the target's states to the stream; EAGLE-1: from an embedding and a state
    Norm target;              // EAGLE-1: of the target's state
    Norm embedding, state;    // of what the layer reads side by side; null in EAGLE-1, where it reads the stream
    int32_t normed_residual;  // whether the stream goes on from the normalised state
    int32_t reserved;
};

struct DecoderSpec {
    const Layer* layers;
    const Entry* entry;     // null: the stream begins with embeddings
    const void* embedding;  // [vocabulary, hidden] elements, or null: the columns of `head`
    Matrix head;
    Norm final;
    int32_t num_layers, hidden, heads, kv_heads, head_size, inner, rotary;
    int32_t element;  // FP32 or BF16: of activations, and of KV where that is not int8
    int32_t activation;
    int32_t norm_whole_rows;  // whether query and key are normalised over all heads at once
    float embedding_scale, residual_scale, logit_scale, logit_softcap;
    KvLayout kv;
};

// One step; see conch.api.StepBatch. Logits are asked for in the order of their tokens.
struct Step {
    Rows rows;
    const int64_t* input_ids;   // [T]
    const int64_t* logit_rows;  // [L]
    void* const* pools;         // one a layer: [2, N, ...]
    float* logits;              // [L, vocabulary]
    Likeliest* likeliest;       // [L]
    int64_t pool_half;          // bytes from a pool's keys to its values
    float* states;              // [T, A, hidden], the stream as it goes into A layers; null where nobody asks
    const int32_t* state_layers;  // [A], rising; one past the last layer is what comes out of that
    const float* given;         // what enters a head: [T, A, hidden] of the target, or [T, hidden] of its own outputs
    float* outputs;             // [L, hidden], the stream before the final norm; null where nobody asks
    int32_t num_logit_rows;
    int32_t num_states;         // A
    int32_t from_target;        // whether `given` are the target's states
    int32_t reserved;
};

}  // namespace conch
