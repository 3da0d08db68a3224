// Tiles of a call: which expert a tile belongs to.
#pragma once

// tiles_before[e], e = 0..n: how many tiles the experts before e have; expert e has `tiles(counts[e])`. One warp calls.
template <typename Tiles>
DEVICE void count_tiles(const int* counts, int n, int* tiles_before, Tiles tiles) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int begin = 0; begin < n; begin += 32) {
        const int own = begin + lane < n ? tiles(counts[begin + lane]) : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const int left = shuffle(sum, lane >= step ? lane - step : lane);
            sum += lane >= step ? left : 0;
        }
        if (begin + lane < n) tiles_before[begin + lane] = before + sum - own;
        before += shuffle(sum, 31);
    }
    if (lane == 0) tiles_before[n] = before;
}
