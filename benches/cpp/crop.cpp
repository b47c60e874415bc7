// The bound of augmentation: a plain loop that reads a crop of every image and writes it as float32
// to the same memory in every batch. benches/python/augmentation.py compiles it and calls it.
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

struct Work {
  const uint8_t* images;  // of planes, one after the other
  const int64_t* order;   // which images
  const int64_t* corners;
  int64_t side, crop;
  float* to;
};

void rows(const Work& work, int64_t first, int64_t last) {
  const int64_t plane = work.side * work.side, cropped = work.crop * work.crop;
  for (int64_t row = first; row < last; ++row) {
    const uint8_t* image = work.images + work.order[row] * 3 * plane + work.corners[row];
    float* to = work.to + row * 3 * cropped;
    for (int64_t channel = 0; channel < 3; ++channel) {
      for (int64_t y = 0; y < work.crop; ++y) {
        const uint8_t* from = image + channel * plane + y * work.side;
        for (int64_t x = 0; x < work.crop; ++x) {
          *to++ = static_cast<float>(from[x]) * 0.017f - 2.1f;
        }
      }
    }
  }
}

}  // namespace

extern "C" void crops(const uint8_t* images, const int64_t* order, const int64_t* corners,
                      int64_t count, int64_t side, int64_t crop, float* to, int64_t threads) {
  const Work work{images, order, corners, side, crop, to};
  std::vector<std::thread> others;
  for (int64_t k = 1; k < threads; ++k) {
    others.emplace_back(rows, std::cref(work), count * k / threads, count * (k + 1) / threads);
  }
  rows(work, 0, count / threads);
  for (auto& other : others) other.join();
}
