// A team of threads that go through a step together, one phase after the other.
//
// All members run the same function. A phase is `each(count, work)`: items are claimed one by one, so a member
// whose core is busy with something else does less, and nobody leaves the phase before all items are done; in
// `each_of` members begin with items of their own. A step of few rows has two hundred phases, so waiting spins. Where
// other programs share the cores it hardly does: the one that is waited for, or what has taken its core, may need
// this very one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "crowd.h"

namespace conch {

class Team {
   public:
    explicit Team(int size) : size_(size), dealt_(size) {
        for (int member = 1; member < size; member++) threads_.emplace_back([this, member] { serve(member); });
    }

    ~Team() {
        ending_ = true;
        start();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Run `job(member)` on every member, the caller being member 0; returns when all are through.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        spins_.store(crowd_.is_here() ? LEAST_SPINS : MOST_SPINS, std::memory_order_relaxed);
        start();
        job(0);
        barrier();
    }

    // To be called by all members: each item of [0, count) is done once, by whoever comes first.
    template <class Work>
    void each(int count, Work work) {
        for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(item);
        barrier();
    }

    // To be called by all members, each with its number: items [shares[m], shares[m + 1]) are dealt to member m, which
    // takes them in their order; who is through with its own helps the others with theirs.
    template <class Work>
    void each_of(int member, const int* shares, Work work) {
        for (int turn = 0; turn < size_; turn++) {
            const int whose = (member + turn) % size_, first = shares[whose], count = shares[whose + 1] - first;
            std::atomic<int>& next = dealt_[whose].next;
            while (next.load(std::memory_order_relaxed) < count) {
                const int item = next.fetch_add(1, std::memory_order_relaxed);
                if (item < count) work(first + item);
            }
        }
        barrier();
        dealt_[member].next.store(0, std::memory_order_relaxed);  // seen by all after the next meeting
    }

    // Wait until all members have come here.
    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_acq_rel);
            phase_.notify_all();
        } else {
            wait_while(phase_, phase);
        }
    }

   private:
    static constexpr int MOST_SPINS = 2000;  // some 30 us
    static constexpr int LEAST_SPINS = 60;

    void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
        for (int i = spins_.load(std::memory_order_relaxed); i; i--) {
            if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        value.wait(old, std::memory_order_acquire);
    }

    void start() {
        runs_.fetch_add(1, std::memory_order_release);
        runs_.notify_all();
    }

    void serve(int member) {
        for (uint32_t seen = 0;; seen++) {
            wait_while(runs_, seen);
            if (ending_) return;
            (*job_)(member);
            barrier();
        }
    }

    struct alignas(64) Dealt {
        std::atomic<int> next{0};
    };

    const int size_;
    std::vector<std::thread> threads_;
    std::vector<Dealt> dealt_;  // one a member
    const std::function<void(int)>* job_ = nullptr;
    bool ending_ = false;
    alignas(64) std::atomic<uint32_t> runs_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> spins_{MOST_SPINS};
    Crowd crowd_;
};

// Who works on something together: all of a team, each with its number, or a member alone.
struct Crew {
    Team& team;
    int member;
};

}  // namespace conch
