#include "families/family.h"
#include "families/flux/flux_family.h"
#include "families/sd15/sd15_family.h"
#include "families/sdxl/sdxl_family.h"

namespace latentd {

const std::vector<const Family*>& AllFamilies() {
  static const auto* families =
      new std::vector<const Family*>{new FluxFamily(), new Sd15Family(), new SdxlFamily()};
  return *families;
}

}  // namespace latentd
