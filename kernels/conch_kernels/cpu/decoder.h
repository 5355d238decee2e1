// A decoder described by data, run a whole step at a time.
//
// One description serves the common families: norms before or after a block or both, norms of query and key,
// biases, gated or plain activation, full or partial rotary embedding, sliding windows, soft caps, multipliers.
// What a model lacks is a null pointer or a one. The residual stream is fp32, whatever the weights are.
#pragma once

#include <map>
#include <vector>

#include "entry.h"
#include "gather.h"
#include "layer_work.h"

namespace conch {

template <class E>
class Decoder {
   public:
    explicit Decoder(const DecoderSpec& spec)
        : spec_(spec),
          layers_(spec.layers, spec.layers + spec.num_layers),
          kv_(kv_cache<E>(spec_.kv)),
          work_(spec_, kv_),
          entrance_(spec_) {
        for (int index = 0; index + 1 < spec_.num_layers; index++) {
            const int window = layers_[index].window;
            widest_ = std::max(widest_, window ? window : INT32_MAX);
        }
        if (widest_ == INT32_MAX) widest_ = 0;
    }

    // Writes the step's KV and its logits.
    void run(Team& team, const Step& step) {
        space_.fit(spec_, step, team.size());
        if (spec_.entry) entrance_.fit(step);
        if (own_.size() < size_t(team.size())) own_ = std::vector<Own<E>>(team.size());
        Plans plans;
        for (int index = 0; index + 1 < spec_.num_layers; index++) plan(plans, layers_[index].window, step.rows, team);
        Plans ending;  // of the last layer, whose output is wanted in some rows only
        const std::vector<int32_t> cu_wanted = wanted_queries(step);
        Rows wanted = step.rows;
        wanted.cu_query = cu_wanted.data();
        plan(ending, layers_.back().window, ends_with_states(step) ? step.rows : wanted, team);
        team.run([&](int member) { go(Crew{team, member}, step, plans, ending); });
        for (int row = 0; row < step.num_logit_rows; row++) {
            step.likeliest[row] = {-INFINITY, 0};
            for (int member = 0; member < team.size(); member++) own_[member].seen.improve(row, step.likeliest[row]);
        }
    }

   private:
    static constexpr Norm NO_NORM = {};

    using Plans = std::map<int, AttentionPlan>;  // by window

    void plan(Plans& plans, int window, const Rows& rows, const Team& team) const {
        plans.try_emplace(window, rows, spec_.kv, spec_.heads, window, team.size());
    }

    // Where each row's wanted queries begin among all that are: they are the row's last ones.
    static std::vector<int32_t> wanted_queries(const Step& step) {
        std::vector<int32_t> begins(step.rows.rows + 1);
        int found = 0;
        for (int row = 0; row < step.rows.rows; row++) {
            while (found < step.num_logit_rows && step.logit_rows[found] < step.rows.cu_query[row + 1]) found++;
            begins[row + 1] = found;
        }
        return begins;
    }

    void go(Crew all, const Step& step, const Plans& plans, const Plans& ending) {
        Own<E>& own = own_[all.member];
        const int last = spec_.num_layers - 1;
        int rows = step.rows.tokens;
        if (rows > MAX_ROWS && last)  // fewer fetch nothing
            own.later.list(plans.at(widest_), spec_.kv.is_int8 ? 1 : sizeof(E), all.member);
        own.later.rest();
        const Left<E> joined = enter(all.team, step, own);
        for (int index = 0; index <= last; index++) {
            const Layer& layer = layers_[index];
            const Pool pool = pool_of(step, index);
            spread(all, rows, [&](const Strip<E>& strip) {
                if (index) work_.finish(strip, layers_[index - 1], layer.qkv);
                const Left<E> normed = index || !joined.count
                                           ? work_.settle(strip, owed_to(index), layer.attention_in)
                                           : joined.part(strip.first, strip.count);
                keep_states(step, strip, index);
                work_.project(strip, normed, step.rows, layer, pool);
            });
            if (index == last && !ends_with_states(step) && !(rows = gather(all.team, step))) return;
            const int wide = spec_.heads * spec_.head_size;
            const Heads<E> query{space_.query.data(), wide, spec_.head_size};
            kv_.attend(all, (index == last ? ending : plans).at(layer.window), layer.attention, pool, query,
                       space_.attended.data(), own.attention);
            if (rows > MAX_ROWS && index < last)
                own.later.aim(pool_of(step, index + 1));
            else
                own.later.rest();
        }
        end(all, step, rows);
    }

    // From the last layer's attention to the logits.
    void end(Crew all, const Step& step, int rows) {
        const int layers = spec_.num_layers;
        const Norm& owed = owed_to(layers);
        const bool with_states = ends_with_states(step);
        spread(all, rows, [&](const Strip<E>& strip) {
            work_.finish(strip, layers_.back(), spec_.head);
            if (owed.weight) work_.settle(strip, owed, NO_NORM);
            if (with_states) keep_states(step, strip, layers);
        });
        if (with_states) {
            all.team.barrier();
            if (!(rows = gather(all.team, step))) return;
        }
        Own<E>& own = own_[all.member];
        own.seen.begin(rows);
        const Strip<E> whole = space_.whole(all, own, rows);
        const Left<E> left = work_.settle(whole, NO_NORM, spec_.final);
        if (step.outputs) keep_rows(whole, step.outputs, spec_.hidden);
        product(whole, left, spec_.head, spec_.head, logits(step.logits, own.seen));
        end_stores_past();  // the team meets once more
    }

    // Takes rows through work that is local to each: together, or strip by strip.
    template <class Work>
    void spread(Crew all, int rows, Work work) {
        const Strips strips(rows, all.team.size());
        Own<E>& own = own_[all.member];
        if (strips.count() == 1) return work(space_.whole(all, own, rows));
        own.scratch.fit(spec_, strips.longest());
        all.team.each(strips.count(),
                      [&](int i) { work(space_.part(spec_, own, strips.begin(i), strips.begin(i + 1))); });
    }

    // The norm that what a layer's forerunner has left in `block` still has to go through.
    const Norm& owed_to(int layer) const {
        return layer ? layers_[layer - 1].mlp_out : NO_NORM;
    }

    static Pool pool_of(const Step& step, int layer) {
        return {step.pools[layer], static_cast<char*>(step.pools[layer]) + step.pool_half};
    }

    // Begins the stream; returns what the first layer reads, or no rows where that is the stream, normalised.
    Left<E> enter(Team& team, const Step& step, Own<E>& own) {
        if (spec_.entry) return entrance_.join(team, step, space_.stream.data(), layers_.front().qkv, own.later);
        embed(team, step);
        return {};
    }

    void embed(Team& team, const Step& step) {
        const int hidden = spec_.hidden;
        team.each(step.rows.tokens, [&](int token) {
            int64_t id = step.input_ids[token];
            float* out = space_.stream.data() + ptrdiff_t(token) * hidden;
            if (spec_.embedding) {
                const E* row = static_cast<const E*>(spec_.embedding) + id * hidden;
                for (int i = 0; i < hidden; i += LANES) store(out + i, load(row + i) * spec_.embedding_scale);
            } else {
                gather_column(spec_.head, int(id), out);
                for (int i = 0; i < hidden; i++) out[i] *= spec_.embedding_scale;
            }
        });
    }

    // Moves the rows whose logits are wanted to the front and returns how many there are. After the last layer's keys
    // and values nothing needs the others.
    int gather(Team& team, const Step& step) {
        const int rows = step.num_logit_rows;
        if (rows && rows < step.rows.tokens)
            team.each(1, [&](int) {
                for (int row = 0; row < rows; row++) {
                    move_row(space_.stream.data(), spec_.hidden, step.logit_rows[row], row);
                    move_row(space_.query.data(), spec_.heads * spec_.head_size, step.logit_rows[row], row);
                }
            });
        return rows;
    }

    // Whether somebody asks for what comes out of the last layer, of tokens without logits too.
    bool ends_with_states(const Step& step) const {
        return step.states && step.state_layers[step.num_states - 1] == spec_.num_layers;
    }

    // Copies the stream as it goes into a layer, where that is asked for. Nobody changes it before the next meeting.
    void keep_states(const Step& step, const Strip<E>& strip, int layer) const {
        if (!step.states) return;
        const ptrdiff_t hidden = spec_.hidden, wide = hidden * step.num_states;
        for (int place = 0; place < step.num_states; place++) {
            if (step.state_layers[place] == layer)
                keep_rows(strip, step.states + strip.first * wide + place * hidden, wide);
        }
    }

    void keep_rows(const Strip<E>& strip, float* to, ptrdiff_t stride) const {
        const ptrdiff_t hidden = spec_.hidden;
        for (int row = strip.crew.member; row < strip.count; row += strip.crew.team.size())
            std::copy_n(strip.stream + row * hidden, hidden, to + row * stride);
    }

    template <class T>
    static void move_row(T* rows, ptrdiff_t size, ptrdiff_t from, ptrdiff_t to) {
        if (from != to) std::copy_n(rows + from * size, size, rows + to * size);
    }

    // What becomes of the last product.
    auto logits(float* out, Seen& seen) {
        const Matrix& weight = spec_.head;
        const float scale = spec_.logit_scale, cap = spec_.logit_softcap;
        return [=, &weight, &seen](int first, int rows, int column, const float* values) {
            const int columns = weight.columns, width = std::min(PANEL, columns - column);
            for (int row = 0; row < rows; row++) {
                float* at = out + ptrdiff_t(first + row) * columns + column;
                for (int i = 0; i < width; i += LANES) {
                    F32 x = load(values + row * PANEL + i);
                    if (weight.bias)
                        for (int lane = 0; lane < std::min(LANES, width - i); lane++)
                            x[lane] += weight.bias[column + i + lane];
                    x *= scale;
                    if (cap) x = cap * tanh(x / cap);
                    seen.see(first + row, column + i, x, width - i);
                    if (width - i >= LANES)
                        rows > FEW_ROWS ? store_past(at + i, x) : store(at + i, x);
                    else
                        std::copy_n(reinterpret_cast<const float*>(&x), width - i, at + i);
                }
            }
        };
    }

    DecoderSpec spec_;
    std::vector<Layer> layers_;
    const KvCache<E>& kv_;
    int32_t widest_ = 0;  // of the windows of all layers but the last; 0 where one has none
    const LayerWork<E> work_;
    Workspace<E> space_;
    Entrance<E> entrance_;
    std::vector<Own<E>> own_;  // one a member
};

}  // namespace conch
