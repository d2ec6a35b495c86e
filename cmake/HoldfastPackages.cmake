# What is handed out but the Python client's wheel (client-lib/python): the systemd unit, and the relocatable tarball or the
# Debian packages (scripts/package).
include(GNUInstallDirs)

install(FILES ${PROJECT_SOURCE_DIR}/deploy/ckptd.yaml ${PROJECT_SOURCE_DIR}/docs/operations.md
  ${PROJECT_SOURCE_DIR}/docs/configuration.md
  ${PROJECT_SOURCE_DIR}/deploy/prometheus/alerts.yaml ${PROJECT_SOURCE_DIR}/deploy/grafana/holdfast.json
  ${PROJECT_SOURCE_DIR}/docs/alerts.md
  DESTINATION ${CMAKE_INSTALL_DATADIR}/holdfast COMPONENT daemon)

# The unit names the place of installation, which `cmake --install --prefix` may change: made then, in components of their
# own. `service` puts it where `systemctl enable FILE` finds it, `debian` (below) into the system.
set(HOLDFAST_DROP_INS ${PROJECT_SOURCE_DIR}/deploy/systemd/tiers.conf ${PROJECT_SOURCE_DIR}/deploy/systemd/user.conf)
function(holdfast_install_unit destination component)
  install(CODE "
    set(CMAKE_INSTALL_FULL_BINDIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
    set(HOLDFAST_OPERATIONS \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}/holdfast/operations.md\")
    configure_file(\"${PROJECT_SOURCE_DIR}/deploy/systemd/ckptd.service.in\"
      \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${destination}/ckptd.service\" @ONLY NO_SOURCE_PERMISSIONS)"
    COMPONENT ${component} ${ARGN})
endfunction()
holdfast_install_unit(${CMAKE_INSTALL_DATADIR}/holdfast service)
install(FILES ${HOLDFAST_DROP_INS} DESTINATION ${CMAKE_INSTALL_DATADIR}/holdfast COMPONENT service)
set(HOLDFAST_SLURM_DIR ${PROJECT_SOURCE_DIR}/deploy/slurm)
install(PROGRAMS ${HOLDFAST_SLURM_DIR}/prolog ${HOLDFAST_SLURM_DIR}/epilog ${HOLDFAST_SLURM_DIR}/task_prolog
  ${HOLDFAST_SLURM_DIR}/train.sbatch
  DESTINATION ${CMAKE_INSTALL_DATADIR}/holdfast/slurm COMPONENT daemon)
install(FILES ${HOLDFAST_SLURM_DIR}/settings.sh
  DESTINATION ${CMAKE_INSTALL_DATADIR}/holdfast/slurm COMPONENT daemon)

# The tarball is unpacked anywhere, on machines with nothing but the C and C++ runtime: its programs find the libraries that
# lie beside them before any other (DT_RPATH, which LD_LIBRARY_PATH does not override).
if(HOLDFAST_PACKAGE)
  set_target_properties(ckptd ckptctl PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
  set_target_properties(holdfast PROPERTIES INSTALL_RPATH "$ORIGIN")
  foreach(target ckptd ckptctl holdfast)
    target_link_options(${target} PRIVATE "LINKER:--disable-new-dtags")
  endforeach()
  install(CODE "execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/carry-libraries
    \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib\" \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/licences\"
    $<TARGET_FILE:ckptd> $<TARGET_FILE:ckptctl> $<TARGET_FILE:holdfast> COMMAND_ERROR_IS_FATAL ANY)" COMPONENT libraries)
  foreach(package libxxhash-dev libprotozero-dev nlohmann-json3-dev libcli11-dev) # headers alone
    install(FILES /usr/share/doc/${package}/copyright DESTINATION share/licences RENAME ${package}.copyright COMPONENT daemon)
  endforeach()
  install(FILES ${HOLDFAST_WHEEL} DESTINATION wheel COMPONENT wheel)
  install(FILES ${PROJECT_SOURCE_DIR}/docs/install.md ${PROJECT_SOURCE_DIR}/docs/ckptctl.md ${PROJECT_SOURCE_DIR}/docs/capacity.md
    ${PROJECT_SOURCE_DIR}/docs/tuning.md DESTINATION share/holdfast COMPONENT daemon)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION . COMPONENT daemon)

  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_NAME holdfast)
  set(CPACK_PACKAGE_FILE_NAME holdfast-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR})
  set(CPACK_COMPONENTS_ALL daemon client development libraries wheel)
  set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
  set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
  set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
  set(CPACK_STRIP_FILES ON)
  include(CPack)
else()
  include(HoldfastDebian)
endif()
