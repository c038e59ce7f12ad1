#include "families/family.h"
#include "families/flux/flux_family.h"

namespace latentd {

const std::vector<const Family*>& AllFamilies() {
  static const auto* families = new std::vector<const Family*>{new FluxFamily()};
  return *families;
}

}  // namespace latentd
