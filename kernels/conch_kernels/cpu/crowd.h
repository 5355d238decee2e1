// Whether other programs want the core of this thread.
#pragma once

#include <sys/resource.h>

#include <chrono>

namespace conch {

class Crowd {
   public:
    // Since it was asked last: whether the thread that asks, always the same one, was made to leave its core oftener
    // than every PATIENCE.
    bool is_here() {
#if defined(RUSAGE_THREAD)
        rusage usage;
        getrusage(RUSAGE_THREAD, &usage);
        const auto now = std::chrono::steady_clock::now();
        const bool often = (usage.ru_nivcsw - evictions_) * PATIENCE > now - asked_;
        evictions_ = usage.ru_nivcsw;
        asked_ = now;
        return often;
#else
        return false;
#endif
    }

   private:
    static constexpr std::chrono::milliseconds PATIENCE{2};

    long evictions_ = 0;
    std::chrono::steady_clock::time_point asked_{};
};

}  // namespace conch
