// Runs the .cu kernels on the CPU, as they stand: the blocks of a grid one after another, the threads of a
// block in a loop, or as fibers (one stack each) that give way at every barrier. Threads and blocks run
// upwards or downwards: where a barrier is missing or two threads write one place, the two orders differ.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#include <ucontext.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
using std::max;
using std::min;
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }

namespace on_host {

constexpr int bad_grid = 1, divergent_barrier = 2;

class Block {  // the threads of one block, as fibers
public:
    explicit Block(unsigned num_threads) : threads(num_threads) {}

    int run(void (*body)(void*), void* argument, bool downwards)
    {
        current_block = this, kernel = body, kernel_argument = argument;
        for (Thread& thread : threads) prepare(thread);
        for (;;) {  // from barrier to barrier
            size_t num_done = 0;
            for (size_t k = 0; k < threads.size(); ++k) {
                running = downwards ? threads.size() - 1 - k : k;
                threadIdx = {(unsigned)running, 0, 0};
                enter(threads[running]);
                num_done += threads[running].is_done;
            }
            if (num_done == threads.size()) return 0;
            if (num_done) return divergent_barrier;  // some returned while others wait for them
        }
    }

    void wait_for_others() { leave(threads[running], false); }
    static Block* current_block;

private:
    static constexpr size_t stack_bytes = 64 << 10;
    struct Thread {
        ucontext_t context;
        std::unique_ptr<char[]> stack{new char[stack_bytes]};
        void* fake_stack = nullptr;
        bool is_done = false;
    };
    std::vector<Thread> threads;
    size_t running = 0;
    ucontext_t scheduler;
    void (*kernel)(void*) = nullptr;
    void* kernel_argument = nullptr;
    void* scheduler_fake_stack = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;

    void prepare(Thread& thread)
    {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = stack_bytes;
        thread.context.uc_link = nullptr;
        thread.is_done = false;
        makecontext(&thread.context, start, 0);
    }

    static void start()
    {
        Block& block = *current_block;
        block.entered(nullptr);
        block.kernel(block.kernel_argument);
        Thread& thread = block.threads[block.running];
        thread.is_done = true;
        block.leave(thread, true);
    }

    // The address sanitizer must be told of every change of stack.
    void enter(Thread& thread)
    {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(&scheduler_fake_stack, thread.stack.get(), stack_bytes);
#endif
        swapcontext(&scheduler, &thread.context);
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
    }

    void leave(Thread& thread, [[maybe_unused]] bool for_ever)
    {
#ifdef __SANITIZE_ADDRESS__
        void** kept = for_ever ? nullptr : &thread.fake_stack;
        __sanitizer_start_switch_fiber(kept, scheduler_stack, scheduler_stack_bytes);
#endif
        swapcontext(&thread.context, &scheduler);
        entered(thread.fake_stack);
    }

    void entered([[maybe_unused]] void* fake_stack)
    {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
    }
};

Block* Block::current_block = nullptr;

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void* const* arguments, std::index_sequence<I...>)
{
    kernel(*static_cast<Args*>(arguments[I])...);
}

// kernel<<<(grid_x, grid_y), num_threads>>>(arguments...), each argument by its address as cuLaunchKernel
// takes them.
template <auto kernel, class... Args>
int launch(
    void (*)(Args...), unsigned grid_x, unsigned grid_y, unsigned num_threads, bool has_barriers, bool downwards,
    void* const* arguments)
{
    if (!grid_x || !grid_y || !num_threads || num_threads > 1024) return bad_grid;
    gridDim = {grid_x, grid_y, 1}, blockDim = {num_threads, 1, 1};
    auto body = [](void* arguments) {
        call(kernel, static_cast<void* const*>(arguments), std::index_sequence_for<Args...>{});
    };
    Block block(has_barriers ? num_threads : 0);
    for (unsigned n = 0; n < grid_x * grid_y; ++n) {
        const unsigned b = downwards ? grid_x * grid_y - 1 - n : n;
        blockIdx = {b % grid_x, b / grid_x, 0};
        if (has_barriers) {
            if (int error = block.run(body, const_cast<void**>(arguments), downwards)) return error;
            continue;
        }
        for (unsigned k = 0; k < num_threads; ++k) {
            threadIdx = {downwards ? num_threads - 1 - k : k, 0, 0};
            body(const_cast<void**>(arguments));
        }
    }
    return 0;
}

}  // namespace on_host

static inline void __syncthreads() { on_host::Block::current_block->wait_for_others(); }

#define ON_HOST(kernel, has_barriers)                                                                        \
    extern "C" int kernel##_on_host(                                                                         \
        unsigned grid_x, unsigned grid_y, unsigned num_threads, int downwards, void* const* arguments)       \
    {                                                                                                        \
        return on_host::launch<&kernel>(kernel, grid_x, grid_y, num_threads, has_barriers, downwards, arguments); \
    }
