#pragma once

#include "matmul.h"

namespace {

using kvferry::native::kDepth;
using kvferry::native::kSpreadStride;
using kvferry::native::LinearArgs;

void linear(const LinearArgs& args, int first_row, int last_row, int first_panel, int last_panel) {
  for (int panel = first_panel; panel < last_panel; ++panel)
    for (int column = 0; column < args.columns; column += kDepth) {
      const std::ptrdiff_t block = column / kDepth;
      Tile tile{
          .a = args.x + first_row * args.x_stride + column,
          .a_stride = args.x_stride,
          .b = args.packed + (static_cast<std::ptrdiff_t>(panel) * args.columns + column) * kPanel,
          .c = args.y + first_row * args.y_stride + panel * kPanel,
          .c_stride = args.y_stride,
          .depth = args.columns - column < kDepth ? args.columns - column : kDepth,
          .add = args.add || column > 0,
          .bias = args.bias && column == 0 ? args.bias + panel * kPanel : nullptr,
          .width = args.outputs - panel * kPanel,
      };
      if (args.spread) {
        tile.a = args.spread + (block * args.spread_rows + first_row) * kSpreadStride;
        multiply<Fetch::kNext, kSpreadStride>(tile, last_row - first_row);
      } else {
        multiply<Fetch::kNext>(tile, last_row - first_row);
      }
    }
}

}  // namespace
