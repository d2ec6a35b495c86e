# What is installed beside the programs: settings, pages, the systemd unit, scripts for Slurm; and the Debian packages. The
# tarball and the daemon's wheel are made of what is installed (scripts/package).
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

include(HoldfastDebian)
